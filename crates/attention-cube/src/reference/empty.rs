//! Attention without queries or without keys, which no kernel is asked for.

use super::parts;
use super::tensors::{bool_dtype, cast, fill_rows, float_dtype, is_negative_infinity, sum_to};
use crate::AttentionProblem;
use crate::backend::{
    AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved, logsumexp_dtype,
};
use crate::select::BackwardRequest;
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// Whether there are queries, which then see nothing.
fn has_rows(problem: &AttentionProblem) -> bool {
    !problem.logsumexp_shape().contains(&0)
}

/// No query or no key: output 0, logsumexp −∞ or the sink.
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
                // A sink of −∞ is none, and so a constant.
                let none = is_negative_infinity::<B>(&scores);
                scores = B::float_mask_fill(scores, none, f64::NEG_INFINITY.into());
            }
            B::float_expand(scores, rows)
        }
        None => B::float_full(rows, f64::NEG_INFINITY.into(), &device, float_dtype(dtype)),
    };
    // The zero output stays a function of the query, so that autodiff finds a (zero) gradient, whatever the query holds.
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

/// The gradients of nothing: zeros, but for the sinks, which the logsumexp may still equal.
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
    AttentionGradients {
        query: request.query.then(|| zeros(&inputs.query)).into(),
        key: request.key.then(|| zeros(&inputs.key)).into(),
        value: request.value.then(|| zeros(&inputs.value)).into(),
        bias: bias.map(|bias| zeros(&bias)).into(),
        sinks: sinks
            .map(|sinks| match saved.logsumexp_gradient.into_option() {
                Some(gradient) if has_rows(problem) => {
                    let per_head = Shape::new([1, problem.q_heads, 1]);
                    let [gradient, _] = parts::<B>(gradient, problem);
                    let gradient = sum_to::<B>(gradient, &per_head);
                    let gradient = B::float_reshape(gradient, sinks.shape());
                    let scores = cast::<B>(sinks.clone(), gradient.dtype());
                    // A sink of −∞ is none.
                    let none = is_negative_infinity::<B>(&scores);
                    let gradient = B::float_mask_fill(gradient, none, 0.0.into());
                    cast::<B>(gradient, sinks.dtype())
                }
                _ => zeros(&sinks),
            })
            .into(),
    }
}
