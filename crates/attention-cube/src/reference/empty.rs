//! Attention without queries or without keys, which no kernel is asked for.

use super::parts;
use super::tensors::{cast, float_dtype, sum_to};
use crate::AttentionProblem;
use crate::backend::{
    AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved, logsumexp_dtype,
};
use crate::select::BackwardRequest;
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

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
            B::float_expand(cast::<B>(sinks, dtype), rows)
        }
        None => B::float_full(rows, f64::NEG_INFINITY.into(), &device, float_dtype(dtype)),
    };
    // The zero output stays a function of the query, so that autodiff finds a (zero) gradient.
    let output = B::float_zeros(
        Shape::new(problem.output_shape()),
        &device,
        float_dtype(problem.dtype),
    );
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
                Some(gradient) if problem.batch * problem.q_len > 0 => {
                    let per_head = Shape::new([1, problem.q_heads, 1]);
                    let [gradient, _] = parts::<B>(gradient, problem);
                    let gradient = sum_to::<B>(gradient, &per_head);
                    cast::<B>(B::float_reshape(gradient, sinks.shape()), sinks.dtype())
                }
                _ => zeros(&sinks),
            })
            .into(),
    }
}
