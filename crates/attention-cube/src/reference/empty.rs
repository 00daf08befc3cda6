//! Attention without queries or without keys. No kernel serves such a problem.

use super::parts;
use super::tensors::{bool_dtype, cast, fill_rows, float_dtype, is_negative_infinity, sum_to};
use crate::problem::AttentionProblem;
use crate::types::request::BackwardRequest;
use crate::types::tensors::{
    AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved, logsumexp_dtype,
};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// True if the problem has queries. In this module, problems with queries have no keys, so no query sees a key.
fn has_rows(problem: &AttentionProblem) -> bool {
    !problem.logsumexp_shape().contains(&0)
}

/// Computes the forward pass of a problem without queries or without keys. The output is 0. The logsumexp is the head's
/// sink, or −∞ without sinks.
pub(super) fn forward<B: Backend>(
    inputs: &AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    let device = inputs.query.device();
    let dtype = logsumexp_dtype(problem);
    let rows = Shape::new(problem.logsumexp_shape());
    let logsumexp = match inputs.sinks.clone().into_option() {
        Some(sinks) => {
            let sinks = B::float_reshape(sinks, Shape::new([1, problem.q_heads, 1]));
            let mut scores = cast::<B>(sinks, dtype);
            if has_rows(problem) {
                // A sink of −∞ counts as no sink, so the logsumexp must not pass a gradient to the sink.
                let none = is_negative_infinity::<B>(&scores);
                scores = B::float_mask_fill(scores, none, f64::NEG_INFINITY.into());
            }
            B::float_expand(scores, rows)
        }
        None => B::float_full(rows, f64::NEG_INFINITY.into(), &device, float_dtype(dtype)),
    };
    // The zero output is computed from the query, so that autodiff gives the query a gradient. This gradient is zero even if
    // the query contains NaN.
    let query = inputs.query.clone();
    let shape = Shape::new(problem.output_shape());
    let output = if has_rows(problem) {
        let all = B::bool_ones(Shape::new([1; 4]), &device, bool_dtype::<B>(&query));
        let nothing = B::float_sum_dim(fill_rows::<B>(query, &all), 3);
        let zeros = B::float_zeros(shape, &device, float_dtype(problem.dtype));
        B::float_add(zeros, nothing)
    } else {
        B::float_reshape(query, shape)
    };
    AttentionOutput { output, logsumexp }
}

/// Computes [`forward`], but returns the logsumexp in two parts, as [`AttentionOutput`] requires. The first part is the
/// whole logsumexp, and the second part is 0.
pub(crate) fn forward_in_parts<B: Backend>(
    inputs: &AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    let AttentionOutput { output, logsumexp } = forward(inputs, problem);
    let logsumexp = match has_rows(problem) {
        true => {
            let dtype = float_dtype(logsumexp.dtype());
            let logarithms = B::float_zeros(logsumexp.shape(), &logsumexp.device(), dtype);
            B::float_cat(vec![logsumexp, logarithms], 0)
        }
        false => B::float_reshape(logsumexp, Shape::new(problem.logsumexp_parts_shape())),
    };
    AttentionOutput { output, logsumexp }
}

/// Computes the gradients of an empty problem. Only the gradient of the sinks may be nonzero, because the logsumexp
/// without keys is the sink.
pub(crate) fn backward<B: Backend>(
    inputs: AttentionInputs<B>,
    saved: AttentionSaved<B>,
    problem: &AttentionProblem,
    request: BackwardRequest,
) -> AttentionGradients<B> {
    let zeros = |like: &FloatTensor<B>| {
        B::float_zeros(like.shape(), &like.device(), float_dtype(like.dtype()))
    };
    let bias = inputs.bias.into_option().filter(|_| request.bias);
    let sinks = inputs.sinks.into_option().filter(|_| request.sinks);
    let table = inputs.score_table.into_option().filter(|_| request.table);
    AttentionGradients {
        query: request.query.then(|| zeros(&inputs.query)).into(),
        key: request.key.then(|| zeros(&inputs.key)).into(),
        value: request.value.then(|| zeros(&inputs.value)).into(),
        bias: bias.map(|bias| zeros(&bias)).into(),
        table: table.map(|table| zeros(&table)).into(),
        sinks: sinks
            .map(|sinks| match saved.logsumexp_gradient.into_option() {
                Some(gradient) if has_rows(problem) => {
                    let per_head = Shape::new([1, problem.q_heads, 1]);
                    let [gradient, _] = parts::<B>(gradient, problem);
                    let gradient = sum_to::<B>(gradient, &per_head);
                    let gradient = B::float_reshape(gradient, sinks.shape());
                    let scores = cast::<B>(sinks.clone(), gradient.dtype());
                    // The gradient of a sink of −∞ is set to 0, because such a sink counts as no sink.
                    let none = is_negative_infinity::<B>(&scores);
                    let gradient = B::float_mask_fill(gradient, none, 0.0.into());
                    cast::<B>(gradient, sinks.dtype())
                }
                _ => zeros(&sinks),
            })
            .into(),
    }
}
