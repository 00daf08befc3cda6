//! All scores, and their softmax.

use super::tensors::{bool_dtype, cast, elementwise_max, fill_rows, from_groups, to_groups};
use super::visibility::{unused, visibility};
use crate::AttentionProblem;
use crate::backend::{AttentionInputs, logsumexp_dtype};
use crate::math::softcap;
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, Shape};

/// The inputs in the dtype of the computation, without what nobody sees, and the scores.
pub(super) struct Scores<B: Backend> {
    /// Grouped: `[batch, kv_heads, group · q_len, head_dim]`.
    pub query: FloatTensor<B>,
    pub key: FloatTensor<B>,
    pub value: FloatTensor<B>,
    /// `[batch, q_heads, q_len, kv_len]`; −∞ where hidden.
    pub scores: FloatTensor<B>,
    /// The softcap's derivative, `1 − tanh²`.
    pub softcap_slope: Option<FloatTensor<B>>,
    /// `[1, q_heads, 1, 1]`.
    pub sinks: Option<FloatTensor<B>>,
    /// The queries that see no key, `[batch, q_heads, q_len, 1]`, where some may.
    pub blind: Option<BoolTensor<B>>,
}

impl<B: Backend> Scores<B> {
    pub fn new(inputs: &AttentionInputs<B>, problem: &AttentionProblem) -> Self {
        let compute = logsumexp_dtype(problem);
        let mut query = cast::<B>(inputs.query.clone(), compute);
        let mut key = cast::<B>(inputs.key.clone(), compute);
        let mut value = cast::<B>(inputs.value.clone(), compute);
        let visible = visibility(inputs, problem);
        let mut blind = None;
        if let Some(visible) = &visible {
            // 0 · NaN is NaN: what takes part in nothing must be zero before it is multiplied by zero.
            let (queries_blind, keys_unseen) = unused::<B>(visible.clone(), problem);
            query = B::float_mask_fill(query, queries_blind.clone(), 0.0.into());
            blind = Some(queries_blind);
            key = B::float_mask_fill(key, keys_unseen.clone(), 0.0.into());
            value = B::float_mask_fill(value, keys_unseen, 0.0.into());
        }
        let query = to_groups::<B>(query, problem);

        let scores = B::float_matmul(query.clone(), B::float_transpose(key.clone()));
        let mut scores =
            B::float_mul_scalar(from_groups::<B>(scores, problem), problem.scale.into());
        let mut softcap_slope = None;
        if let Some(softcap) = problem.softcap {
            let ratios = B::float_div_scalar(scores.clone(), softcap.into());
            let tanh = B::float_tanh(ratios.clone());
            let far = B::float_mul_scalar(tanh.clone(), softcap.into());
            scores = match compute == DType::F32 && softcap::is_wide(problem.softcap) {
                true => widely_capped::<B>(scores, ratios, far),
                false => far,
            };
            let squared = B::float_mul(tanh.clone(), tanh);
            softcap_slope = Some(B::float_add_scalar(B::float_neg(squared), 1.0.into()));
        }
        if let Some(bias) = inputs.bias.clone().into_option() {
            scores = B::float_add(scores, cast::<B>(bias, compute));
        }
        if let Some(visible) = visible {
            let hidden = B::bool_expand(B::bool_not(visible), scores.shape());
            scores = B::float_mask_fill(scores, hidden, f64::NEG_INFINITY.into());
        }
        let sinks = inputs.sinks.clone().into_option().map(|sinks| {
            B::float_reshape(
                cast::<B>(sinks, compute),
                Shape::new([1, problem.q_heads, 1, 1]),
            )
        });
        Self {
            query,
            key,
            value,
            scores,
            softcap_slope,
            sinks,
            blind,
        }
    }
}

/// The scores under a wide softcap, in f32: by the series where their `ratios` to it are near zero, and else `far`.
fn widely_capped<B: Backend>(
    scores: FloatTensor<B>,
    ratios: FloatTensor<B>,
    far: FloatTensor<B>,
) -> FloatTensor<B> {
    let near = f64::from(softcap::NEAR);
    let bools = bool_dtype::<B>(&scores);
    let is_near = B::float_lower_elem(B::float_abs(ratios.clone()), near.into(), bools);
    // Of the others the square may be infinite, and so no number in the gradient.
    let ratios = B::float_clamp(ratios, (-near).into(), near.into());
    let squared = B::float_mul(ratios.clone(), ratios);
    let mut correction = B::float_mul_scalar(squared.clone(), 0.0.into());
    for term in softcap::SERIES.into_iter().rev() {
        let sum = B::float_add_scalar(correction, term.into());
        correction = B::float_mul(sum, squared.clone());
    }
    // The score itself, and not the sum of 1 and the correction times it, which would be rounded before.
    let near = B::float_add(B::float_mul(scores.clone(), correction), scores);
    B::float_mask_where(far, is_near, near)
}

/// The softmax of scores.
pub(super) struct Weights<B: Backend> {
    /// `[batch, q_heads, q_len, kv_len]`.
    pub p: FloatTensor<B>,
    /// The largest score of each query, `[batch, q_heads, q_len, 1]`, finite for one that sees nothing, too.
    pub max: FloatTensor<B>,
    /// The sum of `exp(score − max)`; 1 for a query without any.
    pub sum: FloatTensor<B>,
    /// The queries without any: neither keys nor a sink.
    pub unseeing: BoolTensor<B>,
    /// The queries without keys.
    pub blind: BoolTensor<B>,
}

impl<B: Backend> Weights<B> {
    pub fn new(
        scores: FloatTensor<B>,
        sinks: Option<FloatTensor<B>>,
        problem: &AttentionProblem,
    ) -> Self {
        let lowest = match logsumexp_dtype(problem) {
            DType::F64 => f64::MIN,
            _ => f64::from(f32::MIN),
        };
        let mut max = B::float_clamp_min(B::float_max_dim(scores.clone(), 3), lowest.into());
        if let Some(sinks) = &sinks {
            max = elementwise_max::<B>(max, sinks.clone());
        }
        // The result does not depend on the reference maximum, so no gradient flows through it.
        let max = B::float_detach(max);
        let p = B::float_exp(B::float_sub(scores, max.clone()));
        let mut sum = B::float_sum_dim(p.clone(), 3);
        let bools = bool_dtype::<B>(&sum);
        let is_zero = |sum: &FloatTensor<B>| B::float_equal_elem(sum.clone(), 0.0.into(), bools);
        let blind = is_zero(&sum);
        if let Some(sinks) = sinks {
            sum = B::float_add(sum, B::float_exp(B::float_sub(sinks, max.clone())));
        }
        let unseeing = is_zero(&sum);
        let sum = B::float_mask_fill(sum, unseeing.clone(), 1.0.into());
        // What a query does not see may be NaN, if others see it: neither a product with it nor the product's gradient may tell
        // one that sees nothing.
        let p = fill_rows::<B>(B::float_div(p, sum.clone()), &blind);
        Self {
            p,
            max,
            sum,
            unseeing,
            blind,
        }
    }
}
