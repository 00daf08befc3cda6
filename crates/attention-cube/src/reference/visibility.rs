//! Decides which keys a query sees. Causal mask, lengths, window, segments, intervals, mask, block mask, bias and mask
//! mod can hide keys.

use super::block::Block;
use super::score_mod;
use crate::integers::{INTS, clamped_integers};
use crate::problem::AttentionProblem;
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, Device, IntTensor},
};
use burn::tensor::{BoolDType, DType, Shape, Slice};

/// Returns a mask of the keys that each query sees in a block, or `None` if every query sees every key. The mask
/// broadcasts to the shape of the scores.
pub(super) fn visibility<B: Backend>(block: &Block<B>) -> Option<BoolTensor<B>> {
    let (inputs, problem, place) = (&block.inputs, &block.problem, block.place);
    let device = inputs.query.device();
    // Give all conditions the mask tensor's bool dtype, because the backend's default bool dtype may differ.
    let bools = match inputs.mask.as_option() {
        Some(mask) => mask.dtype().into(),
        None => get_or_init_device_settings::<B>(&device).bool_dtype,
    };
    let queries = || positions::<B>(place.query, problem.q_len, 2, &device);
    let keys = positions::<B>(place.key, problem.kv_len, 3, &device);
    let mut conditions = Vec::new();

    let lengths = inputs.kv_lengths.as_option();
    let lengths = lengths.map(|lengths| clamped::<B>(lengths, place.kv_len, problem.batch));
    let query_lengths = inputs.query_lengths.as_option();
    let query_lengths =
        query_lengths.map(|lengths| clamped::<B>(lengths, place.q_len, problem.batch));
    if let Some(lengths) = &lengths {
        conditions.push(B::int_lower(keys.clone(), lengths.clone(), bools));
    }
    if let Some(lengths) = &query_lengths {
        conditions.push(B::int_lower(queries(), lengths.clone(), bools));
    }
    if let Some(intervals) = inputs.intervals.as_option() {
        conditions.push(within_intervals::<B>(intervals, &keys, block, bools));
    }
    if problem.right().is_some() || problem.window_left.is_some() {
        let plus_length = |queries| match lengths {
            None => B::int_add_scalar(queries, (place.kv_len as i64).into()),
            Some(lengths) => B::int_add(queries, lengths),
        };
        let minus_queries = |queries| match query_lengths {
            None => B::int_sub_scalar(queries, (place.q_len as i64).into()),
            Some(lengths) => B::int_sub(queries, lengths),
        };
        let own = match problem.is_bottom_right() {
            true => minus_queries(plus_length(queries())),
            false => queries(),
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
        let AttentionProblem {
            batch,
            q_len,
            kv_len,
            ..
        } = *problem;
        let queries = B::int_reshape(
            B::int_cast(queries.clone(), INTS),
            Shape::new([batch, 1, q_len, 1]),
        );
        let keys = B::int_reshape(
            B::int_cast(keys.clone(), INTS),
            Shape::new([batch, 1, 1, kv_len]),
        );
        let scores = || Shape::new([batch, 1, q_len, kv_len]);
        conditions.push(B::int_equal(
            B::int_expand(queries, scores()),
            B::int_expand(keys, scores()),
            bools,
        ));
    }
    if let Some(mask) = inputs.mask.as_option() {
        conditions.push(mask_of_scores::<B>(mask, block));
    }
    if let Some(bias) = inputs.bias.clone().into_option() {
        conditions.push(B::float_not_equal_elem(
            bias,
            f64::NEG_INFINITY.into(),
            bools,
        ));
    }
    if let Some(code) = problem.mask_mod {
        conditions.push(score_mod::visible::<B>(code, block, bools));
    }
    conditions.into_iter().reduce(|all, next| {
        let shape = broadcast(&all.shape(), &next.shape());
        B::bool_and(
            B::bool_expand(all, shape.clone()),
            B::bool_expand(next, shape),
        )
    })
}

/// Returns the mask with one element per score of the block. A dimension of size 1 stays, because it is broadcast.
fn mask_of_scores<B: Backend>(mask: &BoolTensor<B>, block: &Block<B>) -> BoolTensor<B> {
    let (problem, place) = (&block.problem, block.place);
    if !problem.has_block_mask() {
        return mask.clone();
    }
    let device = block.inputs.query.device();
    let [of_queries, of_keys] = problem.mask_block;
    let rows = (2, place.query, problem.q_len, of_queries);
    let columns = (3, place.key, problem.kv_len, of_keys);
    [rows, columns]
        .into_iter()
        .filter(|(dim, ..)| mask.shape()[*dim] > 1)
        .fold(mask.clone(), |mask, (dim, first, length, size)| {
            let positions = B::int_arange(first as i64..(first + length) as i64, &device, INTS);
            let elements = B::int_div_scalar(positions, (size as i64).into());
            B::bool_select(mask, dim, elements)
        })
}

/// Returns the lengths of `batch` sequences as i32 `[batch, 1, 1, 1]`, clamped to `0..=most`.
fn clamped<B: Backend>(lengths: &IntTensor<B>, most: usize, batch: usize) -> IntTensor<B> {
    let lengths = clamped_integers::<B>(lengths.clone(), most);
    B::int_reshape(lengths, Shape::new([batch, 1, 1, 1]))
}

/// Returns a mask of the query rows past the sequence's query length, `[batch, q_heads, q_len, 1]`, or `None` if there
/// are no such rows.
pub(crate) fn absent_queries<B: Backend>(block: &Block<B>) -> Option<BoolTensor<B>> {
    let (inputs, problem, place) = (&block.inputs, &block.problem, block.place);
    let lengths = inputs.query_lengths.as_option()?;
    let device = inputs.query.device();
    let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
    let lengths = clamped::<B>(lengths, place.q_len, problem.batch);
    let rows = Shape::new([problem.batch, problem.q_heads, problem.q_len, 1]);
    let queries = positions::<B>(place.query, problem.q_len, 2, &device);
    let absent = B::int_greater_equal(queries, lengths, bools);
    Some(B::bool_expand(absent, rows))
}

/// Returns a mask of the keys that lie in an interval of the query, `[batch, 1, q_len, kv_len]`.
fn within_intervals<B: Backend>(
    intervals: &IntTensor<B>,
    keys: &IntTensor<B>,
    block: &Block<B>,
    bools: BoolDType,
) -> BoolTensor<B> {
    let AttentionProblem {
        batch,
        q_len,
        kv_len,
        intervals: count,
        ..
    } = block.problem;
    // Clamp before the cast, because i32 may not represent all integers of the intervals' dtype.
    let limit = (block.place.kv_len as i64).into();
    let intervals = match intervals.dtype().size() >= DType::from(INTS).size() {
        true => B::int_clamp(intervals.clone(), 0.into(), limit),
        false => intervals.clone(),
    };
    let intervals = B::int_cast(intervals, INTS);
    let scores = || Shape::new([batch, 1, q_len, kv_len]);
    let keys = B::int_expand(keys.clone(), scores());
    let value = |index: usize| {
        let all = Slice::new(0, None, 1);
        let one = Slice::new(index as isize, Some(index as isize + 1), 1);
        let value = B::int_slice(intervals.clone(), &[all, all, one]);
        B::int_expand(
            B::int_reshape(value, Shape::new([batch, 1, q_len, 1])),
            scores(),
        )
    };
    let visible = (0..count).map(|interval| {
        B::bool_and(
            B::int_greater_equal(keys.clone(), value(2 * interval), bools),
            B::int_lower(keys.clone(), value(2 * interval + 1), bools),
        )
    });
    visible
        .reduce(B::bool_or)
        .expect("a problem with interval tensors has at least one interval")
}

/// Clamps a side of the window to 2³⁰, so that its sum with a position fits in i32. A side of 2³⁰ still exceeds every
/// sequence length.
fn clamp_window(window: usize) -> i64 {
    window.min(1 << 30) as i64
}

/// Returns the positions `first..first + length`, along dimension `dim` of a 4-dimensional tensor.
fn positions<B: Backend>(
    first: usize,
    length: usize,
    dim: usize,
    device: &Device<B>,
) -> IntTensor<B> {
    let mut shape = [1; 4];
    shape[dim] = length;
    B::int_reshape(
        B::int_arange(first as i64..(first + length) as i64, device, INTS),
        Shape::new(shape),
    )
}

/// Returns two masks. The first marks the queries that see no key, `[batch, q_heads, q_len, 1]`. The second marks the
/// keys that no query of their GQA group sees, `[batch, kv_heads, kv_len, 1]`.
pub(super) fn unused<B: Backend>(
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
    // Reduce the mask before it is broadcast to the scores. If all heads share the mask, the mask is smaller than the
    // scores.
    let blind = B::bool_not(B::bool_any_dim(visible.clone(), 3));
    let blind = B::bool_expand(blind, Shape::new([batch, q_heads, q_len, 1]));
    let shape = visible.shape();
    let [sequences, heads, rows, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let by_group = match heads {
        1 => visible,
        _ => B::bool_reshape(
            visible,
            Shape::new([sequences, kv_heads, problem.group() * rows, columns]),
        ),
    };
    let unseen = B::bool_not(B::bool_any_dim(by_group, 2));
    let unseen = B::bool_swap_dims(unseen, 2, 3);
    (
        blind,
        B::bool_expand(unseen, Shape::new([batch, kv_heads, kv_len, 1])),
    )
}

fn broadcast(a: &Shape, b: &Shape) -> Shape {
    Shape::new([0, 1, 2, 3].map(|dim| a[dim].max(b[dim])))
}
