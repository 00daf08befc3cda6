//! The gradients of the reference implementation, computed by explicit formulas and without autodiff.

use super::scores::{Scores, Weights};
use super::tensors::{
    bool_dtype, cast, fill_rows, from_groups, is_negative_infinity, sum_to, to_groups,
};
use super::visibility::absent_queries;
use super::{dropout, empty, parts};
use crate::problem::AttentionProblem;
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionSaved, logsumexp_dtype};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// Computes the gradients from recomputed probabilities: `ds = p ∘ (do·vᵀ − Δ)` with `Δ = rowsum(do ∘ o) − dlse` (Dao et al.,
/// FlashAttention, 2022, §B.2).
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
    // Compute the probabilities from the scores, because the saved logsumexp (one f32) of huge scores has lost the logarithm
    // of the softmax sum. If the keys are one shard of several, use the saved logsumexp, which covers the keys of all
    // shards.
    let weights = match request.lse_of_all_shards {
        true => Weights::<B>::of_shard(scores.scores, saved.logsumexp, problem),
        false => Weights::<B>::new(scores.scores, scores.sinks, problem),
    };
    // Set the rows of output gradient and output to zero for a query that sees no key, because these rows may contain NaN.
    // If the keys are one shard of several, do so only for a query that sees no key of any shard, whose logsumexp is −∞.
    let unused = match request.lse_of_all_shards {
        true => Some(&weights.unseeing),
        false => scores.blind.as_ref(),
    };
    // Also set rows past the end of their sequence's queries to zero, because they see no key of any shard.
    let absent = absent_queries::<B>(&inputs, problem);
    let seeing = |rows| {
        let masks = unused.into_iter().chain(&absent);
        masks.fold(rows, |rows, mask| fill_rows::<B>(rows, mask))
    };
    let output_gradient = seeing(cast::<B>(saved.output_gradient, compute));
    let output = seeing(cast::<B>(saved.output, compute));
    let mut delta = B::float_sum_dim(B::float_mul(output_gradient.clone(), output), 3);
    if let Some(gradient) = saved.logsumexp_gradient.into_option() {
        let [gradient, _] = parts::<B>(gradient, problem);
        let gradient = B::float_reshape(cast::<B>(gradient, compute), rows);
        // The logsumexp of a query with neither keys nor a sink is the constant −∞, which has no gradient.
        delta = B::float_sub(delta, fill_rows::<B>(gradient, &weights.unseeing));
    }
    let p = weights.p;
    let factors = problem.dropout.as_ref().map(|dropout| {
        let device = p.device();
        dropout::factors::<B>(dropout, problem, &device)
    });
    let after_dropout = |p: FloatTensor<B>| match &factors {
        Some(factors) => B::float_mul(p, factors.clone()),
        None => p,
    };

    let output_gradient = to_groups::<B>(output_gradient, problem);
    let dv = request.value.then(|| {
        let p = to_groups::<B>(after_dropout(p.clone()), problem);
        let dv = B::float_matmul(B::float_transpose(p), output_gradient.clone());
        cast::<B>(dv, dtype)
    });
    let dp = from_groups::<B>(
        B::float_matmul(output_gradient, B::float_transpose(scores.value)),
        problem,
    );
    let dp = after_dropout(dp);
    // Set dS of hidden keys to 0. The row of V of a hidden key may contain NaN, and 0 · NaN is NaN.
    let unseen = B::float_equal_elem(p.clone(), 0.0.into(), bool_dtype::<B>(&p));
    let ds = B::float_mul(p, B::float_sub(dp, delta.clone()));
    let ds = B::float_mask_fill(ds, unseen.clone(), 0.0.into());
    let dbias = bias
        .filter(|_| request.bias)
        .map(|bias| cast::<B>(sum_to::<B>(ds.clone(), &bias.shape()), bias.dtype()));
    let dsinks = sinks.filter(|_| request.sinks).map(|original| {
        let dtype = original.dtype();
        let logarithm = B::float_log(weights.sum);
        let gradient = sinks_gradient::<B>(original, weights.max, logarithm, delta, problem);
        cast::<B>(gradient, dtype)
    });

    let ds = match scores.slope {
        // Set dS of hidden keys to 0, because the derivative of a hidden score may be NaN.
        Some(slope) => B::float_mask_fill(B::float_mul(ds, slope), unseen, 0.0.into()),
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

/// Computes the sinks' gradient, `−Σ exp(sink − lse)·Δ`, over the batch and the queries. A sink is a score whose row of V is
/// zero.
///
/// # Shapes
/// `sinks [q_heads]`. `reference`, `logarithm` and `delta` are `[batch, q_heads, q_len, 1]`. The LSE is
/// `reference + logarithm`. The gradient is `[q_heads]`, in the dtype of `reference`.
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
    // A sink of −∞ counts as no sink. Its gradient is 0 even if the head's logsumexp or delta is NaN.
    let none = is_negative_infinity::<B>(&scores);
    let p = B::float_exp(B::float_sub(B::float_sub(scores, reference), logarithm));
    let gradient = sum_to::<B>(B::float_neg(B::float_mul(p, delta)), &per_head);
    let gradient = B::float_mask_fill(gradient, none, 0.0.into());
    B::float_reshape(gradient, shape)
}
