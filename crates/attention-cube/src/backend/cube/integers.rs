//! Lengths and segments in one buffer: `[lengths | ids of queries | ids of keys | bounds of the query
//! blocks | bounds of the key blocks]`, so that they take one binding. Bounds are the smallest and the
//! largest id of a block, by which kernels skip pairs of blocks without a common document.

use super::*;
use crate::kernel::visibility::{ExtentLaunch, OPEN, bound_segments, pack_integers};
use burn::backend::ops::{BoolTensorOps, FloatTensorOps};
use cubecl::prelude::CubeDim;

/// Tokens of the blocks that bounds are kept for.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub queries: usize,
    pub keys: usize,
}

/// The packed integers, if any, and the lengths and window with the places in them.
pub(super) fn prepare(
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    blocks: Blocks,
) -> (Option<CubeTensor>, ExtentLaunch) {
    let AttentionProblem {
        batch,
        q_len,
        kv_len,
        ..
    } = *problem;
    let lengths = inputs.kv_lengths.clone().into_option();
    let queries = inputs.query_segments.clone().into_option();
    let keys = inputs.key_segments.clone().into_option();

    let query_blocks = q_len.div_ceil(blocks.queries);
    let key_blocks = kv_len.div_ceil(blocks.keys);
    let query_ids = if lengths.is_some() { batch } else { 0 };
    let key_ids = query_ids + batch * q_len;
    let query_bounds = key_ids + batch * kv_len;
    let key_bounds = query_bounds + 2 * batch * query_blocks;
    let end = key_bounds + 2 * batch * key_blocks;

    let window = |side: Option<usize>| side.map_or(OPEN, |side| side.min(OPEN as usize) as i32);
    let extent = ExtentLaunch::new(
        q_len as i32,
        kv_len as i32,
        window(problem.window_left),
        window(problem.right()),
        i32::from(problem.is_bottom_right()),
        query_ids as u32,
        key_ids as u32,
        query_bounds as u32,
        key_bounds as u32,
    );

    let packed = match (lengths, queries.zip(keys)) {
        (None, None) => None,
        (Some(lengths), None) => {
            if lengths.dtype == DType::I32 && (batch == 1 || lengths.meta.strides()[0] == 1) {
                Some(lengths)
            } else {
                let packed = empty(&inputs.query, [batch], DType::I32);
                pack(lengths, &packed, 0, 1, batch);
                Some(packed)
            }
        }
        (lengths, Some((queries, keys))) => {
            let packed = empty(&inputs.query, [end], DType::I32);
            if let Some(lengths) = lengths {
                pack(lengths, &packed, 0, 1, batch);
            }
            pack(queries, &packed, query_ids, q_len, batch * q_len);
            pack(keys, &packed, key_ids, kv_len, batch * kv_len);
            for (ids, bounds, length, block) in [
                (query_ids, query_bounds, q_len, blocks.queries),
                (key_ids, key_bounds, kv_len, blocks.keys),
            ] {
                let per_sequence = length.div_ceil(block);
                let count = batch * per_sequence;
                // Safety: ids and bounds lie inside `packed`, sized above for both.
                unsafe {
                    bound_segments::launch_unchecked(
                        &packed.client,
                        cube_count(&packed.client, count.div_ceil(UNITS)),
                        CubeDim::new_1d(UNITS as u32),
                        packed.clone().into_tensor_arg(),
                        ids as u32,
                        bounds as u32,
                        length as u32,
                        per_sequence as u32,
                        count as u32,
                        block as u32,
                    );
                }
            }
            Some(packed)
        }
    };
    (packed, extent)
}

const UNITS: usize = 64;

/// Copies `count` integers, rows of `columns`, to `start`.
fn pack(source: CubeTensor, packed: &CubeTensor, start: usize, columns: usize, count: usize) {
    let element = dtype_to_storage_type(source.dtype);
    let source = match source.meta.shape().num_dims() {
        1 => burn_cubecl::ops::reshape(source, Shape::new([count, 1])),
        _ => source,
    };
    // Safety: `count` is the number of elements of `source`, and the callers leave room for it from `start` on.
    unsafe {
        pack_integers::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            source.into_tensor_arg(),
            packed.clone().into_tensor_arg(),
            start as u32,
            columns as u32,
            count as u32,
            element,
        );
    }
}

/// Mask, bias and integers, as kernels with these blocks take them.
pub(super) fn extras(
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    blocks: Blocks,
) -> (Extras, ExtentLaunch) {
    let (integers, extent) = prepare(inputs, problem, blocks);
    // Kernels read these at `[batch, q_heads, q_len, kv_len]`, by their strides.
    let scores = Shape::new([
        problem.batch,
        problem.q_heads,
        problem.q_len,
        problem.kv_len,
    ]);
    let mask = inputs
        .mask
        .clone()
        .into_option()
        .map(|mask| CubeBackend::bool_expand(mask, scores.clone()));
    let bias = inputs
        .bias
        .clone()
        .into_option()
        .map(|bias| CubeBackend::float_expand(bias, scores.clone()));
    let element = |tensor: &Option<CubeTensor>, absent| {
        dtype_to_storage_type(tensor.as_ref().map_or(absent, |tensor| tensor.dtype))
    };
    let extras = Extras {
        mask_element: element(&mask, DType::U32),
        bias_element: element(&bias, DType::F32),
        mask,
        bias,
        integers,
    };
    (extras, extent)
}
