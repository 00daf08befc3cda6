//! The reference implementation: the definition of attention in Burn's own tensor operations. Tests compare every kernel
//! with this implementation. Devices without kernels compute the same scores in blocks, in the crate's module `blocks`.
//!
//! The reference implementation computes in f32 (in f64 for f64 inputs) and holds all scores in memory. Burn's autodiff can
//! differentiate [`attention`].

pub(crate) mod block;
pub(crate) mod dropout;
mod e4m3;
pub(crate) mod empty;
pub(crate) mod gradients;
pub(crate) mod pages;
pub(crate) mod quantized;
pub(crate) mod score_mod;
pub(crate) mod scores;
pub(crate) mod tensors;
pub(crate) mod visibility;

use self::block::Block;
use self::scores::{Scores, Weights};
use self::tensors::{cast, fill_rows, from_groups, to_groups};
use crate::error::AttentionError;
use crate::options::AttentionOptions;
use crate::problem::AttentionProblem;
use crate::types::quantized::QuantizedRows;
use crate::types::tensors::{AttentionInputs, AttentionOutput};
use burn::backend::{Backend, Dispatch, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, Tensor};

/// Computes output and logsumexp of attention by the definition, in tensor operations that Burn's autodiff can differentiate.
///
/// The contract and the shapes are the ones of [`attention_with_lse`](crate::attention_with_lse). The memory is
/// `O(q_len · kv_len)`.
///
/// # Errors
/// Returns [`AttentionError`] if an argument does not fit.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let problem = AttentionProblem::new(&query, &key, &value, &options)?;
    let result = forward::<Dispatch>(
        crate::types::tensors::inputs(query, key, value, options),
        &problem,
    );
    Ok((
        Tensor::from_dispatch(result.output),
        Tensor::from_dispatch(result.logsumexp),
    ))
}

/// Computes [`attention`] over quantized keys and values, dequantized to the query's dtype.
///
/// # Errors
/// Returns [`AttentionError`] if an argument does not fit.
pub fn quantized_attention(
    query: Tensor<4>,
    key: QuantizedRows,
    value: QuantizedRows,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let dtype = query.dtype();
    let [key, value] = [key, value].map(|rows| {
        let format = rows.format();
        let rows = quantized::dequantize::<Dispatch>(rows.into_tensors(), format, dtype);
        Tensor::from_dispatch(rows)
    });
    attention(query, key, value, options)
}

/// Computes the forward pass. Returns the logsumexp as one tensor `[batch, q_heads, q_len]`.
pub(crate) fn forward<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    match problem.is_empty() {
        true => empty::forward(&inputs, problem),
        false => {
            let (inputs, problem) = pages::contiguous::<B>(inputs, problem);
            forward_whole(Block::whole(inputs, problem))
        }
    }
}

/// Computes the forward pass of a block that covers a whole call.
fn forward_whole<B: Backend>(block: Block<B>) -> AttentionOutput<B> {
    let problem = &block.problem;
    let dtype = block.inputs.query.dtype();
    let scores = Scores::<B>::new(&block);
    let value = scores.value;
    let weights = Weights::<B>::new(scores.scores, Scores::<B>::sinks(&block), problem);
    let p = match &problem.dropout {
        Some(dropout) => B::float_mul(weights.p, dropout::factors::<B>(dropout, &block)),
        None => weights.p,
    };
    let output = from_groups::<B>(B::float_matmul(to_groups::<B>(p, problem), value), problem);
    let output = fill_rows::<B>(output, &weights.blind);
    let logsumexp = B::float_mask_fill(
        B::float_add(weights.max, B::float_log(weights.sum)),
        weights.unseeing,
        f64::NEG_INFINITY.into(),
    );
    AttentionOutput {
        output: cast::<B>(output, dtype),
        logsumexp: B::float_reshape(logsumexp, Shape::new(problem.logsumexp_shape())),
    }
}

/// Splits the two-part logsumexp `[2 · batch, q_heads, q_len]` into its halves. The first half holds each query's
/// reference score, which the softmax subtracts from the query's scores. A reference score is near the query's largest
/// score. The second half holds the logarithms of the softmax sums.
pub(crate) fn parts<B: Backend>(
    logsumexp: FloatTensor<B>,
    problem: &AttentionProblem,
) -> [FloatTensor<B>; 2] {
    let [batch, q_heads, q_len] = problem.logsumexp_shape();
    [0..batch, batch..2 * batch].map(|sequences| {
        let ranges = [sequences.into(), (0..q_heads).into(), (0..q_len).into()];
        B::float_slice(logsumexp.clone(), &ranges)
    })
}

/// Converts a call's result to the output and the logsumexp. The result holds the logsumexp in two parts, and the
/// function adds the two parts.
pub(crate) fn output_and_lse(
    result: AttentionOutput<Dispatch>,
    problem: &AttentionProblem,
) -> (Tensor<4>, Tensor<3>) {
    let logsumexp = logsumexp_of_parts::<Dispatch>(result.logsumexp, problem);
    (
        Tensor::from_dispatch(result.output),
        Tensor::from_dispatch(logsumexp),
    )
}

/// Returns the logsumexp, `[batch, q_heads, q_len]`, as the sum of its two parts. The first part holds the reference
/// scores, which the softmax subtracts from the scores. The second part holds the logarithms of the softmax sums.
pub(crate) fn logsumexp_of_parts<B: Backend>(
    parts: FloatTensor<B>,
    problem: &AttentionProblem,
) -> FloatTensor<B> {
    let shape = problem.logsumexp_shape();
    if shape.contains(&0) {
        return B::float_reshape(parts, Shape::new(shape));
    }
    let [references, logarithms] = self::parts::<B>(parts, problem);
    B::float_add(references, logarithms)
}
