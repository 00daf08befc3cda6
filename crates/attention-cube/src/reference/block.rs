//! A block of an attention problem: ranges of the problem's sequences, heads, queries and keys, and the parts of the
//! tensors that lie in these ranges.

use super::score_mod::Tables;
use super::tensors::cast;
use crate::problem::AttentionProblem;
use crate::types::tensors::{AttentionInputs, MaybeInt, logsumexp_dtype};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{Shape, Slice};
use std::ops::Range;
use std::slice;
use std::sync::Arc;

/// The position of a block's first score among all scores of a call, and the sizes of the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The index of the block's first sequence.
    pub sequence: usize,
    /// The index of the block's first query head.
    pub q_head: usize,
    /// The index of the block's first query.
    pub query: usize,
    /// The index of the block's first key.
    pub key: usize,
    /// The number of query heads of the call.
    pub q_heads: usize,
    /// The number of queries per sequence of the call.
    pub q_len: usize,
    /// The number of keys per sequence of the call.
    pub kv_len: usize,
}

/// The tensors and sizes of a block, and the block's place. Keys and values are contiguous, not in pages.
pub(crate) struct Block<B: Backend> {
    /// The parts of the inputs that the block covers. The lengths of sequences are still those of the whole call, not
    /// of the block. A block mask still has the rows and columns of the whole call.
    pub inputs: AttentionInputs<B>,
    /// The options of the call, with the sizes of the block.
    pub problem: AttentionProblem,
    /// The place of the block in the call.
    pub place: Place,
    /// The tables of score mod and mask mod, which all blocks of a call share.
    pub tables: Arc<Tables>,
}

impl<B: Backend> Block<B> {
    /// Returns the block that covers a whole call.
    pub fn whole(inputs: AttentionInputs<B>, problem: AttentionProblem) -> Self {
        let place = Place {
            sequence: 0,
            q_head: 0,
            query: 0,
            key: 0,
            q_heads: problem.q_heads,
            q_len: problem.q_len,
            kv_len: problem.kv_len,
        };
        Self {
            tables: Arc::new(Tables::read(&inputs)),
            inputs,
            problem,
            place,
        }
    }

    /// Returns a part of this block. The ranges are relative to this block. `heads` is a range of key heads. The part
    /// contains all query heads that read these key heads.
    pub fn part(
        &self,
        sequences: Range<usize>,
        heads: Range<usize>,
        queries: Range<usize>,
        keys: Range<usize>,
    ) -> Self {
        let (inputs, problem) = (&self.inputs, &self.problem);
        let group = problem.group();
        let q_heads = heads.start * group..heads.end * group;
        let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
        let of_keys = |columns| [&sequences, &heads, &keys, &(0..columns)].map(Range::clone);
        let scores = [&sequences, &q_heads, &queries, &keys].map(Range::clone);
        let of_query = [&sequences, &q_heads, &queries, &(0..head_dim)].map(Range::clone);
        let of_sequences = |tensor: &MaybeInt<B>| {
            let part =
                |tensor: &IntTensor<B>| ints::<B>(tensor.clone(), slice::from_ref(&sequences));
            MaybeInt::from(tensor.as_option().map(part))
        };
        let of_rows = |tensor: &MaybeInt<B>, rows: &Range<usize>| {
            let part = |tensor: &IntTensor<B>| {
                let ranges = [sequences.clone(), rows.clone(), 0..2 * problem.intervals];
                ints::<B>(tensor.clone(), &ranges[..tensor.shape().num_dims()])
            };
            MaybeInt::from(tensor.as_option().map(part))
        };
        let mask = inputs.mask.as_option().map(|mask| {
            let shape = mask.shape();
            let [sequences, heads, queries, keys] = broadcast(&shape, &scores);
            // A block mask keeps all rows and columns, because its blocks may straddle the edges of this block.
            let [queries, keys] = match problem.has_block_mask() {
                true => [0..shape[2], 0..shape[3]],
                false => [queries, keys],
            };
            bools::<B>(mask.clone(), &[sequences, heads, queries, keys])
        });
        let bias = inputs.bias.as_option().map(|bias| {
            let ranges = broadcast(&bias.shape(), &scores);
            floats::<B>(bias.clone(), &ranges)
        });
        let shape_of = |shape: &Shape| [0, 1, 2, 3].map(|dim| shape[dim]);
        let place = Place {
            sequence: self.place.sequence + sequences.start,
            q_head: self.place.q_head + q_heads.start,
            query: self.place.query + queries.start,
            key: self.place.key + keys.start,
            ..self.place
        };
        let problem = AttentionProblem {
            batch: sequences.len(),
            q_heads: q_heads.len(),
            kv_heads: heads.len(),
            q_len: queries.len(),
            kv_len: keys.len(),
            mask: mask.as_ref().map(|mask| shape_of(&mask.shape())),
            bias: (bias.as_ref().zip(problem.bias))
                .map(|(bias, (_, dtype))| (shape_of(&bias.shape()), dtype)),
            ..problem.clone()
        };
        let inputs = AttentionInputs {
            query: floats::<B>(inputs.query.clone(), &of_query),
            key: floats::<B>(inputs.key.clone(), &of_keys(head_dim)),
            value: floats::<B>(inputs.value.clone(), &of_keys(value_dim)),
            page_table: MaybeInt::Absent,
            mask: mask.into(),
            bias: bias.into(),
            kv_lengths: of_sequences(&inputs.kv_lengths),
            query_lengths: of_sequences(&inputs.query_lengths),
            query_segments: of_rows(&inputs.query_segments, &queries),
            key_segments: of_rows(&inputs.key_segments, &keys),
            intervals: of_rows(&inputs.intervals, &queries),
            sinks: (inputs.sinks.as_option())
                .map(|sinks| floats::<B>(sinks.clone(), &[q_heads]))
                .into(),
            score_table: inputs.score_table.clone(),
            mask_table: inputs.mask_table.clone(),
        };
        Self {
            inputs,
            problem,
            place,
            tables: Arc::clone(&self.tables),
        }
    }

    /// Converts queries, keys and values to the dtype of the computation.
    pub fn in_compute_dtype(mut self) -> Self {
        let compute = logsumexp_dtype(&self.problem);
        let inputs = self.inputs;
        self.inputs = AttentionInputs {
            query: cast::<B>(inputs.query, compute),
            key: cast::<B>(inputs.key, compute),
            value: cast::<B>(inputs.value, compute),
            ..inputs
        };
        self
    }

    /// Removes causal mask, window, lengths, segments and intervals from a block in which these options hide no key.
    pub fn without_positions(mut self) -> Self {
        self.inputs = AttentionInputs {
            kv_lengths: MaybeInt::Absent,
            query_lengths: MaybeInt::Absent,
            query_segments: MaybeInt::Absent,
            key_segments: MaybeInt::Absent,
            intervals: MaybeInt::Absent,
            ..self.inputs
        };
        self.problem = AttentionProblem {
            causal: None,
            window_left: None,
            window_right: None,
            kv_lengths: false,
            query_lengths: false,
            segments: false,
            intervals: 0,
            ..self.problem
        };
        self
    }
}

/// Converts ranges of the scores to ranges of a tensor such as the mask, which is broadcast to the shape of the scores.
/// A dimension of size 1 has the range `0..1`.
fn broadcast(shape: &Shape, scores: &[Range<usize>; 4]) -> [Range<usize>; 4] {
    [0, 1, 2, 3].map(|dim| match shape[dim] {
        1 => 0..1,
        _ => scores[dim].clone(),
    })
}

/// Converts ranges of a tensor to Burn's slices. Returns `None` if the ranges cover the whole tensor.
fn slices(shape: &Shape, ranges: &[Range<usize>]) -> Option<Vec<Slice>> {
    let mut sizes = ranges.iter().enumerate();
    let is_whole = sizes.all(|(dim, range)| range.len() == shape[dim]);
    (!is_whole).then(|| ranges.iter().cloned().map(Slice::from).collect())
}

/// Returns the part of a float tensor in `ranges`.
pub(crate) fn floats<B: Backend>(
    tensor: FloatTensor<B>,
    ranges: &[Range<usize>],
) -> FloatTensor<B> {
    match slices(&tensor.shape(), ranges) {
        Some(slices) => B::float_slice(tensor, &slices),
        None => tensor,
    }
}

fn ints<B: Backend>(tensor: IntTensor<B>, ranges: &[Range<usize>]) -> IntTensor<B> {
    match slices(&tensor.shape(), ranges) {
        Some(slices) => B::int_slice(tensor, &slices),
        None => tensor,
    }
}

fn bools<B: Backend>(tensor: BoolTensor<B>, ranges: &[Range<usize>]) -> BoolTensor<B> {
    match slices(&tensor.shape(), ranges) {
        Some(slices) => B::bool_slice(tensor, &slices),
        None => tensor,
    }
}
