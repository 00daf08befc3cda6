//! The scores of the reference implementation, and their softmax.

use super::tensors::{bool_dtype, cast, elementwise_max, fill_rows, from_groups, to_groups};
use super::visibility::{unused, visibility};
use super::{block::Block, score_mod};
use crate::math::softcap;
use crate::problem::AttentionProblem;
use crate::types::tensors::logsumexp_dtype;
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, Shape};

/// The inputs of a block in the dtype of the computation, and the block's scores. Keys and values that no query of the
/// block sees, and queries that see no key of the block, are set to zero.
pub(crate) struct Scores<B: Backend> {
    /// The queries, grouped by KV head: `[batch, kv_heads, group · q_len, head_dim]`.
    pub query: FloatTensor<B>,
    pub key: FloatTensor<B>,
    pub value: FloatTensor<B>,
    /// The scores, `[batch, q_heads, q_len, kv_len]`. The scores of hidden keys are −∞.
    pub scores: FloatTensor<B>,
    /// The derivative of each score with respect to `scale · q·k`, or `None` without softcap and score mod.
    pub slope: Option<FloatTensor<B>>,
    /// The scores before a score mod whose table has a gradient, or `None` without one.
    pub before: Option<FloatTensor<B>>,
    /// A mask of the queries that see no key of the block, `[batch, q_heads, q_len, 1]`, or `None` if every query sees every
    /// key.
    pub blind: Option<BoolTensor<B>>,
}

impl<B: Backend> Scores<B> {
    pub fn new(block: &Block<B>) -> Self {
        let (inputs, problem) = (&block.inputs, &block.problem);
        let compute = logsumexp_dtype(problem);
        let mut query = cast::<B>(inputs.query.clone(), compute);
        let mut key = cast::<B>(inputs.key.clone(), compute);
        let mut value = cast::<B>(inputs.value.clone(), compute);
        let visible = visibility(block);
        let mut blind = None;
        if let Some(visible) = &visible {
            // Fill with zeros all queries that see no key, and all keys and values that no query sees. These rows may
            // contain NaN, and 0 · NaN is NaN.
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
        let mut slope = None;
        if let Some(softcap) = problem.softcap {
            let ratios = B::float_div_scalar(scores.clone(), softcap.into());
            let tanh = B::float_tanh(ratios.clone());
            let far = B::float_mul_scalar(tanh.clone(), softcap.into());
            scores = match compute == DType::F32 && softcap::is_wide(problem.softcap) {
                true => widely_capped::<B>(scores, ratios, far),
                false => far,
            };
            let squared = B::float_mul(tanh.clone(), tanh);
            // The derivative of the softcap is `1 − tanh²`.
            slope = Some(B::float_add_scalar(B::float_neg(squared), 1.0.into()));
        }
        let mut before = None;
        if let Some(code) = problem.score_mod {
            before = code.learned.map(|_| scores.clone());
            let hidden = visible
                .as_ref()
                .map(|visible| B::bool_expand(B::bool_not(visible.clone()), scores.shape()));
            let changed = score_mod::changed::<B>(scores, hidden, code, block);
            scores = changed.scores;
            slope = Some(match slope {
                Some(slope) => B::float_mul(slope, changed.derivative),
                None => changed.derivative,
            });
        }
        if let Some(bias) = inputs.bias.clone().into_option() {
            scores = B::float_add(scores, cast::<B>(bias, compute));
        }
        if let Some(visible) = visible {
            let hidden = B::bool_expand(B::bool_not(visible), scores.shape());
            scores = B::float_mask_fill(scores, hidden, f64::NEG_INFINITY.into());
        }
        Self {
            query,
            key,
            value,
            scores,
            slope,
            before,
            blind,
        }
    }

    /// Returns the sinks of a block in the dtype of the computation, `[1, q_heads, 1, 1]`.
    pub fn sinks(block: &Block<B>) -> Option<FloatTensor<B>> {
        let sinks = block.inputs.sinks.as_option()?;
        let sinks = cast::<B>(sinks.clone(), logsumexp_dtype(&block.problem));
        let shape = Shape::new([1, block.problem.q_heads, 1, 1]);
        Some(B::float_reshape(sinks, shape))
    }
}

/// Returns the lowest finite number in the dtype of the computation.
pub(crate) fn lowest(problem: &AttentionProblem) -> f64 {
    match logsumexp_dtype(problem) {
        DType::F64 => f64::MIN,
        _ => f64::from(f32::MIN),
    }
}

/// Returns the scores after a wide softcap (a softcap above 64), in f32. `ratios` holds the scores divided by the
/// softcap. Where a ratio is small, a polynomial gives the result. Where a ratio is not small, the result is the
/// element of `far`, which the caller computes with the tanh.
fn widely_capped<B: Backend>(
    scores: FloatTensor<B>,
    ratios: FloatTensor<B>,
    far: FloatTensor<B>,
) -> FloatTensor<B> {
    let near = f64::from(softcap::NEAR);
    let bools = bool_dtype::<B>(&scores);
    let is_near = B::float_lower_elem(B::float_abs(ratios.clone()), near.into(), bools);
    // Clamp the ratios to the polynomial's range. Squares of larger ratios may be infinite, which would give NaN in the
    // gradient.
    let ratios = B::float_clamp(ratios, (-near).into(), near.into());
    let squared = B::float_mul(ratios.clone(), ratios);
    let mut correction = B::float_mul_scalar(squared.clone(), 0.0.into());
    for term in softcap::SERIES.into_iter().rev() {
        let sum = B::float_add_scalar(correction, term.into());
        correction = B::float_mul(sum, squared.clone());
    }
    // Add `score · correction` to the score. The product `score · (1 + correction)` would be less exact, because rounding
    // `1 + correction` loses digits of the correction.
    let near = B::float_add(B::float_mul(scores.clone(), correction), scores);
    B::float_mask_where(far, is_near, near)
}

/// The result of the softmax of the scores.
pub(super) struct Weights<B: Backend> {
    /// The probabilities, `[batch, q_heads, q_len, kv_len]`.
    pub p: FloatTensor<B>,
    /// The largest score of each query, `[batch, q_heads, q_len, 1]`. The number is finite even for a query that sees no
    /// key.
    pub max: FloatTensor<B>,
    /// The sum of `exp(score − max)` for each query. The sum is 1 for a query with neither keys nor a sink.
    pub sum: FloatTensor<B>,
    /// A mask of the queries that have neither keys nor a sink.
    pub unseeing: BoolTensor<B>,
    /// A mask of the queries that see no key.
    pub blind: BoolTensor<B>,
}

impl<B: Backend> Weights<B> {
    pub fn new(
        scores: FloatTensor<B>,
        sinks: Option<FloatTensor<B>>,
        problem: &AttentionProblem,
    ) -> Self {
        let lowest = lowest(problem).into();
        let mut max = B::float_clamp_min(B::float_max_dim(scores.clone(), 3), lowest);
        if let Some(sinks) = &sinks {
            max = elementwise_max::<B>(max, sinks.clone());
        }
        // The maximum is detached from autodiff, because the softmax does not depend on the number that is subtracted.
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
        // For a query that sees no key, the gradient of P may be NaN, because hidden rows of V may contain NaN.
        // `fill_rows` stops this gradient.
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
