//! The definition of attention in Burn's own tensor operations: the oracle of every test, and what
//! devices without CubeCL run.
//!
//! It computes in f32 (in f64 for f64 inputs) and keeps all scores of all queries in memory: read it
//! for what the operator means, not for how fast it can be. [`attention`] is differentiable by Burn's
//! autodiff, which is what the explicit backward of the fused operator is checked against.

pub(crate) mod empty;
pub(crate) mod gradients;
pub(crate) mod quantized;
mod scores;
mod tensors;
mod visibility;

use self::scores::{Scores, Weights};
use self::tensors::{cast, fill_rows, float_dtype, from_groups, to_groups};
use crate::backend::{AttentionInputs, AttentionOutput};
use crate::quantized::QuantizedRows;
use crate::{AttentionError, AttentionOptions, AttentionProblem};
use burn::backend::{
    Backend, Dispatch, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{Shape, Tensor};

/// Output and logsumexp of attention by the definition, in plain tensor operations that Burn's
/// autodiff differentiates: the same contract as [`attention_with_lse`](crate::attention_with_lse),
/// with O(q_len × kv_len) memory.
///
/// # Errors
/// [`AttentionError`] where an argument does not fit.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let problem = AttentionProblem::new(&query, &key, &value, &options)?;
    let result = forward::<Dispatch>(crate::inputs(query, key, value, options), &problem);
    Ok((
        Tensor::from_dispatch(result.output),
        Tensor::from_dispatch(result.logsumexp),
    ))
}

/// [`attention`] over what quantized keys and values stand for, in the query's dtype.
///
/// # Errors
/// [`AttentionError`] where an argument does not fit.
pub fn quantized_attention(
    query: Tensor<4>,
    key: QuantizedRows,
    value: QuantizedRows,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let dtype = query.dtype();
    let [key, value] = [key, value].map(|rows| {
        let rows = quantized::dequantize::<Dispatch>(rows.into_tensors(), dtype);
        Tensor::from_dispatch(rows)
    });
    attention(query, key, value, options)
}

/// The forward.
pub(crate) fn forward<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    match problem.is_empty() {
        true => empty::forward(&inputs, problem),
        false => forward_and_blind(inputs, problem).0,
    }
}

/// The forward of a problem that is not empty, and the queries that see no key, `[batch, q_heads, q_len, 1]`.
fn forward_and_blind<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> (AttentionOutput<B>, BoolTensor<B>) {
    let dtype = inputs.query.dtype();
    let scores = Scores::<B>::new(&inputs, problem);
    let value = scores.value;
    let weights = Weights::<B>::new(scores.scores, scores.sinks, problem);
    let output = from_groups::<B>(
        B::float_matmul(to_groups::<B>(weights.p, problem), value),
        problem,
    );
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

/// The forward, with the logsumexp in the parts that the operator of a backend gives: all of it is the first.
pub(crate) fn forward_in_parts<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    let (AttentionOutput { output, logsumexp }, blind) = match problem.is_empty() {
        true => (empty::forward(&inputs, problem), None),
        false => {
            let (output, blind) = forward_and_blind(inputs, problem);
            (output, Some(blind))
        }
    };
    let mut logarithms = B::float_zeros(
        logsumexp.shape(),
        &logsumexp.device(),
        float_dtype(logsumexp.dtype()),
    );
    if let Some(blind) = blind {
        // A kernel's backward knows by −0 that a query sees no key.
        let blind = B::bool_reshape(blind, Shape::new(problem.logsumexp_shape()));
        logarithms = B::float_mask_fill(logarithms, blind, (-0.0).into());
    }
    let logsumexp = match problem.logsumexp_shape().contains(&0) {
        true => B::float_reshape(logsumexp, Shape::new(problem.logsumexp_parts_shape())),
        false => B::float_cat(vec![logsumexp, logarithms], 0),
    };
    AttentionOutput { output, logsumexp }
}

/// What is of the references in a tensor like the logsumexp's parts, and what of the logarithms.
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

/// The logsumexp of its parts, `[batch, q_heads, q_len]`.
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
