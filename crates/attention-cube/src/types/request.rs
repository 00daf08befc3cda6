//! The parameters of one pass: its direction (forward or backward), the wanted gradients, and the memory layout of the
//! inputs.

use crate::problem::AttentionProblem;

/// The largest sequence length, in tokens, at which i32 positions do not overflow.
pub(crate) const MAX_LENGTH: usize = 1 << 29;

/// The direction of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The forward pass, which computes the output and the logsumexp (LSE).
    Forward,
    /// The backward pass, which computes the gradients.
    Backward,
}

/// The gradients that a backward pass must compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardRequest {
    /// True if the gradient of the query is wanted.
    pub query: bool,
    /// True if the gradient of the keys is wanted.
    pub key: bool,
    /// True if the gradient of the values is wanted.
    pub value: bool,
    /// True if the gradient of the bias is wanted. A bias with one element per score costs an extra pass over all scores.
    pub bias: bool,
    /// True if the gradient of the sinks is wanted.
    pub sinks: bool,
    /// True if the gradient of the score mod's table is wanted. This gradient costs an extra pass over all scores.
    pub table: bool,
    /// True if the call's keys are only one shard of all keys, while output and logsumexp cover the keys of all shards.
    pub lse_of_all_shards: bool,
}

/// The memory layout of the inputs' rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layouts {
    /// True if every row can be read in vectors of four elements.
    pub vectors: bool,
    /// The operands that Hopper's TMA can read in place. TMA requires contiguous rows that start at multiples of 16 bytes.
    pub tma: Operands,
    /// True if TMA can read the bias in place. Any dimension of the bias may be broadcast.
    pub tma_bias: bool,
}

/// A subset of the operands of an attention call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Operands {
    /// True if the subset contains the query.
    pub query: bool,
    /// True if the subset contains the keys.
    pub key: bool,
    /// True if the subset contains the values.
    pub value: bool,
    /// True if the subset contains the gradient of the output. Only the backward pass has this operand.
    pub output_gradient: bool,
}

impl Operands {
    /// The subset that contains all operands.
    pub const ALL: Self = Self {
        query: true,
        key: true,
        value: true,
        output_gradient: true,
    };

    /// Returns the operands of `pass` that are not in the subset.
    pub fn others(self, pass: Pass) -> Self {
        Self {
            query: !self.query,
            key: !self.key,
            value: !self.value,
            output_gradient: !self.output_gradient && pass == Pass::Backward,
        }
    }
}

impl Layouts {
    /// Returns the number of elements per load: 4, or 1 if the strides or sizes of any operand do not allow 4.
    pub(crate) fn vector(&self, problem: &AttentionProblem) -> usize {
        let fours = problem.head_dim.is_multiple_of(4) && problem.value_dim.is_multiple_of(4);
        if self.vectors && fours { 4 } else { 1 }
    }

    /// Returns the layout of contiguous inputs.
    pub fn contiguous(problem: &AttentionProblem) -> Self {
        let dots = problem.head_dim.is_multiple_of(8);
        let values = problem.value_dim.is_multiple_of(8);
        // The number of elements of a key or value in 16 bytes: 16 codes, or 8 elements in half precision.
        let piece = if problem.quantized.is_some() { 16 } else { 8 };
        Self {
            vectors: problem.head_dim.is_multiple_of(4) && problem.value_dim.is_multiple_of(4),
            tma: Operands {
                query: dots,
                key: problem.head_dim.is_multiple_of(piece),
                value: problem.value_dim.is_multiple_of(piece),
                output_gradient: values,
            },
            tma_bias: problem.kv_len.is_multiple_of(8),
        }
    }
}
