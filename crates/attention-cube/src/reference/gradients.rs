//! The gradients, written out.

use super::scores::{Scores, Weights};
use super::tensors::{
    bool_dtype, cast, fill_rows, from_groups, is_negative_infinity, sum_to, to_groups,
};
use super::{empty, parts};
use crate::AttentionProblem;
use crate::backend::{AttentionGradients, AttentionInputs, AttentionSaved, logsumexp_dtype};
use crate::select::BackwardRequest;
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// The gradients, from the probabilities that the logsumexp gives back:
/// `ds = p ∘ (do·vᵀ − Δ)` with `Δ = rowsum(do ∘ o) − dlse` (Dao et al., FlashAttention, 2022, §B.2).
pub(crate) fn backward<B: Backend>(
    inputs: AttentionInputs<B>,
    saved: AttentionSaved<B>,
    problem: &AttentionProblem,
    request: BackwardRequest,
) -> AttentionGradients<B> {
    let dtype = inputs.query.dtype();
    let compute = logsumexp_dtype(problem);
    let bias = inputs.bias.clone().into_option();
    let sinks = inputs.sinks.clone().into_option();
    if problem.is_empty() {
        return empty::backward(inputs, saved, problem, request);
    }

    let scores = Scores::<B>::new(&inputs, problem);
    let rows = Shape::new([problem.batch, problem.q_heads, problem.q_len, 1]);
    // What reaches a query that sees nothing goes nowhere, whatever it is.
    let seeing = |rows| match &scores.blind {
        Some(blind) => fill_rows::<B>(rows, blind),
        None => rows,
    };
    // Not by the logsumexp: where scores are huge, one number does not keep how many there were.
    let weights = Weights::<B>::new(scores.scores, scores.sinks, problem);
    let output_gradient = seeing(cast::<B>(saved.output_gradient, compute));
    let output = seeing(cast::<B>(saved.output, compute));
    let mut delta = B::float_sum_dim(B::float_mul(output_gradient.clone(), output), 3);
    if let Some(gradient) = saved.logsumexp_gradient.into_option() {
        let [gradient, _] = parts::<B>(gradient, problem);
        let gradient = B::float_reshape(cast::<B>(gradient, compute), rows);
        // Beside neither a key nor a sink the logsumexp is −∞, a constant.
        delta = B::float_sub(delta, fill_rows::<B>(gradient, &weights.unseeing));
    }
    let p = weights.p;

    let output_gradient = to_groups::<B>(output_gradient, problem);
    let dv = request.value.then(|| {
        let p = to_groups::<B>(p.clone(), problem);
        let dv = B::float_matmul(B::float_transpose(p), output_gradient.clone());
        cast::<B>(dv, dtype)
    });
    let dp = from_groups::<B>(
        B::float_matmul(output_gradient, B::float_transpose(scores.value)),
        problem,
    );
    // A value that others see may be NaN.
    let unseen = B::float_equal_elem(p.clone(), 0.0.into(), bool_dtype::<B>(&p));
    let ds = B::float_mul(p, B::float_sub(dp, delta.clone()));
    let ds = B::float_mask_fill(ds, unseen, 0.0.into());
    let dbias = bias
        .filter(|_| request.bias)
        .map(|bias| cast::<B>(sum_to::<B>(ds.clone(), &bias.shape()), bias.dtype()));
    let dsinks = sinks.filter(|_| request.sinks).map(|original| {
        let dtype = original.dtype();
        let logarithm = B::float_log(weights.sum);
        let gradient = sinks_gradient::<B>(original, weights.max, logarithm, delta, problem);
        cast::<B>(gradient, dtype)
    });

    let ds = match scores.softcap_slope {
        Some(slope) => B::float_mul(ds, slope),
        None => ds,
    };
    let ds = to_groups::<B>(B::float_mul_scalar(ds, problem.scale.into()), problem);
    let dq = request.query.then(|| {
        let dq = from_groups::<B>(B::float_matmul(ds.clone(), scores.key), problem);
        let dq = match &scores.blind {
            Some(blind) => fill_rows::<B>(dq, blind),
            None => dq,
        };
        cast::<B>(dq, dtype)
    });
    let dk = request.key.then(|| {
        let dk = B::float_matmul(B::float_transpose(ds), scores.query);
        cast::<B>(dk, dtype)
    });
    AttentionGradients {
        query: dq.into(),
        key: dk.into(),
        value: dv.into(),
        bias: dbias.into(),
        sinks: dsinks.into(),
    }
}

/// The sinks' gradient, `−Σ exp(sink − lse)·Δ` over the batch and the queries: a sink is a score whose
/// value is zero. The logsumexp's `reference` and `logarithm` and `delta` are `[batch, q_heads, q_len, 1]`, and the gradient has their
/// dtype.
pub(crate) fn sinks_gradient<B: Backend>(
    sinks: FloatTensor<B>,
    reference: FloatTensor<B>,
    logarithm: FloatTensor<B>,
    delta: FloatTensor<B>,
    problem: &AttentionProblem,
) -> FloatTensor<B> {
    let compute = reference.dtype();
    let per_head = Shape::new([1, problem.q_heads, 1, 1]);
    let shape = sinks.shape();
    let scores = B::float_reshape(cast::<B>(sinks, compute), per_head.clone());
    // A sink of −∞ is none, beside whatever the others of its head are.
    let none = is_negative_infinity::<B>(&scores);
    let p = B::float_exp(B::float_sub(B::float_sub(scores, reference), logarithm));
    let gradient = sum_to::<B>(B::float_neg(B::float_mul(p, delta)), &per_head);
    let gradient = B::float_mask_fill(gradient, none, 0.0.into());
    B::float_reshape(gradient, shape)
}
