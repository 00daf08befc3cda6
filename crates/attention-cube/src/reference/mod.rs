//! The reference implementation: the definition of attention in Burn's own tensor operations. Tests compare every kernel
//! with this implementation, and devices without CubeCL run it.
//!
//! The reference implementation computes in f32 (in f64 for f64 inputs) and holds all scores in memory. Burn's autodiff can
//! differentiate [`attention`].

mod dropout;
mod e4m3;
pub(crate) mod empty;
pub(crate) mod gradients;
pub(crate) mod pages;
pub(crate) mod quantized;
mod score_mod;
mod scores;
pub(crate) mod tensors;
mod visibility;

use self::scores::{Scores, Weights};
use self::tensors::{cast, fill_rows, float_dtype, from_groups, to_groups};
use crate::error::AttentionError;
use crate::options::AttentionOptions;
use crate::problem::AttentionProblem;
use crate::types::quantized::QuantizedRows;
use crate::types::tensors::{AttentionInputs, AttentionOutput};
use burn::backend::{
    Backend, Dispatch, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{Shape, Tensor};

/// Computes output and logsumexp of attention by the definition, in tensor operations that Burn's autodiff can differentiate.
///
/// The contract and the shapes are the ones of [`attention_with_lse`](crate::attention_with_lse). The memory is O(q_len ×
/// kv_len).
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

/// Computes the forward. Returns the logsumexp as one tensor `[batch, q_heads, q_len]`.
pub(crate) fn forward<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    match problem.is_empty() {
        true => empty::forward(&inputs, problem),
        false => {
            let (inputs, problem) = pages::contiguous::<B>(inputs, problem);
            forward_and_blind(inputs, &problem).0
        }
    }
}

/// Computes the forward of a non-empty problem. Also returns a mask of the queries that see no key,
/// `[batch, q_heads, q_len, 1]`.
fn forward_and_blind<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> (AttentionOutput<B>, BoolTensor<B>) {
    let dtype = inputs.query.dtype();
    let scores = Scores::<B>::new(&inputs, problem);
    let value = scores.value;
    let weights = Weights::<B>::new(scores.scores, scores.sinks, problem);
    let p = match &problem.dropout {
        Some(dropout) => {
            let device = weights.p.device();
            B::float_mul(weights.p, dropout::factors::<B>(dropout, problem, &device))
        }
        None => weights.p,
    };
    let output = from_groups::<B>(B::float_matmul(to_groups::<B>(p, problem), value), problem);
    let output = fill_rows::<B>(output, &weights.blind);
    let logsumexp = B::float_mask_fill(
        B::float_add(weights.max, B::float_log(weights.sum)),
        weights.unseeing,
        f64::NEG_INFINITY.into(),
    );
    let output = AttentionOutput {
        output: cast::<B>(output, dtype),
        logsumexp: B::float_reshape(logsumexp, Shape::new(problem.logsumexp_shape())),
    };
    (output, weights.blind)
}

/// Computes the forward. The first half of the returned logsumexp holds the logsumexp of each query as one number. The
/// second half is −0 for a query that sees no key, and +0 for any other query. In a problem without queries or keys, the
/// second half is +0 throughout.
pub(crate) fn forward_in_parts<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    let (AttentionOutput { output, logsumexp }, blind) = match problem.is_empty() {
        true => (empty::forward(&inputs, problem), None),
        false => {
            let (inputs, problem) = pages::contiguous::<B>(inputs, problem);
            let (output, blind) = forward_and_blind(inputs, &problem);
            (output, Some(blind))
        }
    };
    let mut logarithms = B::float_zeros(
        logsumexp.shape(),
        &logsumexp.device(),
        float_dtype(logsumexp.dtype()),
    );
    if let Some(blind) = blind {
        // Sets the logarithm of queries that see no key to −0. The backward of a kernel recognizes these queries by −0.
        let blind = B::bool_reshape(blind, Shape::new(problem.logsumexp_shape()));
        logarithms = B::float_mask_fill(logarithms, blind, (-0.0).into());
    }
    let logsumexp = match problem.logsumexp_shape().contains(&0) {
        true => B::float_reshape(logsumexp, Shape::new(problem.logsumexp_parts_shape())),
        false => B::float_cat(vec![logsumexp, logarithms], 0),
    };
    AttentionOutput { output, logsumexp }
}

/// Splits a logsumexp `[2 · batch, q_heads, q_len]` into its halves: the reference scores and the logarithms of the softmax
/// sums. The reference scores are near the row maxima.
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

/// Returns the output of a call's result, and the logsumexp as the sum of its reference scores and logarithms.
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

/// Adds the reference scores and the logarithms of the logsumexp, and returns their sum `[batch, q_heads, q_len]`.
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
