//! The definition of attention in Burn's own tensor operations: the oracle of every test, and what
//! devices without CubeCL run.
//!
//! It computes in f32 (in f64 for f64 inputs) and keeps all scores of all queries in memory: read it
//! for what the operator means, not for how fast it can be. [`attention`] is differentiable by Burn's
//! autodiff, which is what the explicit backward of the fused operator is checked against.

use crate::backend::{
    AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved, logsumexp_dtype,
};
use crate::math::softcap;
use crate::select::BackwardRequest;
use crate::{AttentionError, AttentionOptions, AttentionProblem};
use burn::backend::{
    Backend, Dispatch, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, Device, FloatTensor, IntTensor},
};
use burn::tensor::{BoolDType, DType, FloatDType, IntDType, Shape, Tensor};

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

/// The forward.
pub(crate) fn forward<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    let dtype = inputs.query.dtype();
    if problem.is_empty() {
        return forward_of_nothing(&inputs, problem);
    }
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
    AttentionOutput {
        output: cast::<B>(output, dtype),
        logsumexp: B::float_reshape(logsumexp, Shape::new(problem.logsumexp_shape())),
    }
}

/// The forward, with the logsumexp in the parts that the operator of a backend gives: all of it is the first.
pub(crate) fn forward_in_parts<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    let AttentionOutput { output, logsumexp } = forward(inputs, problem);
    let logarithms = B::float_zeros(
        logsumexp.shape(),
        &logsumexp.device(),
        float_dtype(logsumexp.dtype()),
    );
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
        return backward_of_nothing(inputs, saved, problem, request);
    }

    let scores = Scores::<B>::new(&inputs, problem);
    let rows = Shape::new([problem.batch, problem.q_heads, problem.q_len, 1]);
    // What reaches a query that sees nothing goes nowhere, whatever it is.
    let seeing = |rows| match &scores.blind {
        Some(blind) => fill_rows::<B>(rows, blind),
        None => rows,
    };
    // Of such a query the logsumexp is the sink, if there is one, and else −∞, a constant.
    let logsumexp = logsumexp_of_parts::<B>(saved.logsumexp, problem);
    let logsumexp = B::float_reshape(logsumexp, rows.clone());
    let bools = bool_dtype::<B>(&logsumexp);
    let constant = B::float_equal_elem(logsumexp.clone(), f64::NEG_INFINITY.into(), bools);
    let defined = |rows| fill_rows::<B>(rows, &constant);
    let logsumexp = defined(logsumexp);
    let output_gradient = seeing(cast::<B>(saved.output_gradient, compute));
    let output = seeing(cast::<B>(saved.output, compute));
    let mut delta = B::float_sum_dim(B::float_mul(output_gradient.clone(), output), 3);
    if let Some(gradient) = saved.logsumexp_gradient.into_option() {
        let [gradient, _] = parts::<B>(gradient, problem);
        let gradient = B::float_reshape(cast::<B>(gradient, compute), rows);
        delta = B::float_sub(delta, defined(gradient));
    }
    // Not by the logsumexp: where scores are huge, one number does not keep how many there were.
    let p = Weights::<B>::new(scores.scores, scores.sinks, problem).p;

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
    let unseen = B::float_equal_elem(p.clone(), 0.0.into(), bools);
    let ds = B::float_mul(p, B::float_sub(dp, delta.clone()));
    let ds = B::float_mask_fill(ds, unseen, 0.0.into());
    let dbias = bias
        .filter(|_| request.bias)
        .map(|bias| cast::<B>(sum_to::<B>(ds.clone(), &bias.shape()), bias.dtype()));
    let dsinks = sinks.filter(|_| request.sinks).map(|original| {
        let dtype = original.dtype();
        let gradient = sinks_gradient::<B>(original, logsumexp, delta, problem);
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
/// value is zero. `logsumexp` and `delta` are `[batch, q_heads, q_len, 1]`, and the gradient has their dtype.
pub(crate) fn sinks_gradient<B: Backend>(
    sinks: FloatTensor<B>,
    logsumexp: FloatTensor<B>,
    delta: FloatTensor<B>,
    problem: &AttentionProblem,
) -> FloatTensor<B> {
    let compute = logsumexp.dtype();
    let per_head = Shape::new([1, problem.q_heads, 1, 1]);
    let shape = sinks.shape();
    let scores = B::float_reshape(cast::<B>(sinks, compute), per_head.clone());
    // A sink of −∞ is none, also beside no key.
    let bools = bool_dtype::<B>(&scores);
    let none = B::float_equal_elem(scores.clone(), f64::NEG_INFINITY.into(), bools);
    let p = B::float_exp(B::float_sub(scores, logsumexp));
    let p = fill_rows::<B>(p, &none);
    let gradient = sum_to::<B>(B::float_neg(B::float_mul(p, delta)), &per_head);
    B::float_reshape(gradient, shape)
}

/// No query or no key: output 0, logsumexp −∞ or the sink.
pub(crate) fn forward_of_nothing<B: Backend>(
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
pub(crate) fn backward_of_nothing<B: Backend>(
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

/// The inputs in the dtype of the computation, without what nobody sees, and the scores.
struct Scores<B: Backend> {
    /// Grouped: `[batch, kv_heads, group · q_len, head_dim]`.
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    value: FloatTensor<B>,
    /// `[batch, q_heads, q_len, kv_len]`; −∞ where hidden.
    scores: FloatTensor<B>,
    /// The softcap's derivative, `1 − tanh²`.
    softcap_slope: Option<FloatTensor<B>>,
    /// `[1, q_heads, 1, 1]`.
    sinks: Option<FloatTensor<B>>,
    /// The queries that see no key, `[batch, q_heads, q_len, 1]`, where some may.
    blind: Option<BoolTensor<B>>,
}

impl<B: Backend> Scores<B> {
    fn new(inputs: &AttentionInputs<B>, problem: &AttentionProblem) -> Self {
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
struct Weights<B: Backend> {
    /// `[batch, q_heads, q_len, kv_len]`.
    p: FloatTensor<B>,
    /// The largest score of each query, `[batch, q_heads, q_len, 1]`, finite for one that sees nothing, too.
    max: FloatTensor<B>,
    /// The sum of `exp(score − max)`; 1 for a query without any.
    sum: FloatTensor<B>,
    /// The queries without any: neither keys nor a sink.
    unseeing: BoolTensor<B>,
    /// The queries without keys.
    blind: BoolTensor<B>,
}

impl<B: Backend> Weights<B> {
    fn new(
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

/// Which keys each query sees, broadcastable to the scores; `None` if all see all.
fn visibility<B: Backend>(
    inputs: &AttentionInputs<B>,
    problem: &AttentionProblem,
) -> Option<BoolTensor<B>> {
    let device = inputs.query.device();
    let settings = get_or_init_device_settings::<B>(&device);
    let (ints, bools) = (settings.int_dtype, settings.bool_dtype);
    let (q_len, kv_len) = (problem.q_len, problem.kv_len);
    let mut conditions = Vec::new();

    let lengths = inputs.kv_lengths.as_option().map(|lengths| {
        let clamp = |lengths| B::int_clamp(lengths, 0.into(), (kv_len as i64).into());
        // In the wider of the two dtypes, which holds both the lengths and their bound.
        let lengths = match lengths.dtype().size() < DType::from(ints).size() {
            true => clamp(B::int_cast(lengths.clone(), ints)),
            false => B::int_cast(clamp(lengths.clone()), ints),
        };
        B::int_reshape(lengths, Shape::new([problem.batch, 1, 1, 1]))
    });
    let keys = positions::<B>(kv_len, 3, &device, ints);
    if let Some(lengths) = &lengths {
        conditions.push(B::int_lower(keys.clone(), lengths.clone(), bools));
    }
    if problem.right().is_some() || problem.window_left.is_some() {
        let queries = positions::<B>(q_len, 2, &device, ints);
        let own = match (problem.is_bottom_right(), lengths) {
            (false, _) => queries,
            (true, None) => B::int_add_scalar(queries, (kv_len as i64 - q_len as i64).into()),
            (true, Some(lengths)) => {
                B::int_add(queries, B::int_sub_scalar(lengths, (q_len as i64).into()))
            }
        };
        if let Some(right) = problem.right() {
            let last = B::int_add_scalar(own.clone(), clamp_window(right).into());
            conditions.push(B::int_lower_equal(keys.clone(), last, bools));
        }
        if let Some(left) = problem.window_left {
            let first = B::int_sub_scalar(own, clamp_window(left).into());
            conditions.push(B::int_greater_equal(keys, first, bools));
        }
    }
    let segments = inputs.query_segments.as_option();
    if let Some((queries, keys)) = segments.zip(inputs.key_segments.as_option()) {
        let queries = B::int_reshape(
            B::int_cast(queries.clone(), ints),
            Shape::new([problem.batch, 1, q_len, 1]),
        );
        let keys = B::int_reshape(
            B::int_cast(keys.clone(), ints),
            Shape::new([problem.batch, 1, 1, kv_len]),
        );
        let scores = |heads| Shape::new([problem.batch, heads, q_len, kv_len]);
        conditions.push(B::int_equal(
            B::int_expand(queries, scores(1)),
            B::int_expand(keys, scores(1)),
            bools,
        ));
    }
    if let Some(mask) = inputs.mask.as_option() {
        conditions.push(mask.clone());
    }
    if let Some(bias) = inputs.bias.clone().into_option() {
        conditions.push(B::float_not_equal_elem(
            bias,
            f64::NEG_INFINITY.into(),
            bools,
        ));
    }
    conditions.into_iter().reduce(|all, next| {
        let shape = broadcast(&all.shape(), &next.shape());
        B::bool_and(
            B::bool_expand(all, shape.clone()),
            B::bool_expand(next, shape),
        )
    })
}

/// A window wider than any sequence, in numbers that a 32-bit position can be added to.
fn clamp_window(window: usize) -> i64 {
    window.min(1 << 30) as i64
}

/// `0..length` along dimension `dim` of four.
fn positions<B: Backend>(
    length: usize,
    dim: usize,
    device: &Device<B>,
    dtype: IntDType,
) -> IntTensor<B> {
    let mut shape = [1; 4];
    shape[dim] = length;
    B::int_reshape(
        B::int_arange(0..length as i64, device, dtype),
        Shape::new(shape),
    )
}

/// The queries that see no key `[batch, q_heads, q_len, 1]`, and the keys that no query of their group
/// sees `[batch, kv_heads, kv_len, 1]`.
fn unused<B: Backend>(
    visible: BoolTensor<B>,
    problem: &AttentionProblem,
) -> (BoolTensor<B>, BoolTensor<B>) {
    let AttentionProblem {
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        ..
    } = *problem;
    let visible = B::bool_expand(visible, Shape::new([batch, q_heads, q_len, kv_len]));
    let seeing = B::bool_any_dim(visible.clone(), 3);
    let by_group = Shape::new([batch, kv_heads, problem.group() * q_len, kv_len]);
    let seen = B::bool_any_dim(B::bool_reshape(visible, by_group), 2);
    let seen = B::bool_reshape(seen, Shape::new([batch, kv_heads, kv_len, 1]));
    (B::bool_not(seeing), B::bool_not(seen))
}

/// `[batch, q_heads, q_len, n]` → `[batch, kv_heads, group · q_len, n]`, so that no key is repeated.
fn to_groups<B: Backend>(tensor: FloatTensor<B>, problem: &AttentionProblem) -> FloatTensor<B> {
    let columns = tensor.shape()[3];
    let rows = problem.group() * problem.q_len;
    B::float_reshape(
        tensor,
        Shape::new([problem.batch, problem.kv_heads, rows, columns]),
    )
}

/// The inverse of [`to_groups`].
fn from_groups<B: Backend>(tensor: FloatTensor<B>, problem: &AttentionProblem) -> FloatTensor<B> {
    let columns = tensor.shape()[3];
    let shape = [problem.batch, problem.q_heads, problem.q_len, columns];
    B::float_reshape(tensor, Shape::new(shape))
}

/// Zeros where `mask` says so, which is broadcast.
fn fill_rows<B: Backend>(tensor: FloatTensor<B>, mask: &BoolTensor<B>) -> FloatTensor<B> {
    let mask = B::bool_expand(mask.clone(), tensor.shape());
    B::float_mask_fill(tensor, mask, 0.0.into())
}

/// Sums the dimensions that `shape` has as 1.
fn sum_to<B: Backend>(mut tensor: FloatTensor<B>, shape: &Shape) -> FloatTensor<B> {
    for dim in 0..shape.num_dims() {
        if shape[dim] == 1 && tensor.shape()[dim] != 1 {
            tensor = B::float_sum_dim(tensor, dim);
        }
    }
    tensor
}

fn elementwise_max<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let b = B::float_expand(b, a.shape());
    let bools = bool_dtype::<B>(&a);
    let smaller = B::float_lower(a.clone(), b.clone(), bools);
    B::float_mask_where(a, smaller, b)
}

fn broadcast(a: &Shape, b: &Shape) -> Shape {
    Shape::new([0, 1, 2, 3].map(|dim| a[dim].max(b[dim])))
}

fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype {
        return tensor;
    }
    B::float_cast(tensor, float_dtype(dtype))
}

fn float_dtype(dtype: DType) -> FloatDType {
    dtype.into()
}

fn bool_dtype<B: Backend>(tensor: &FloatTensor<B>) -> BoolDType {
    get_or_init_device_settings::<B>(&tensor.device()).bool_dtype
}
