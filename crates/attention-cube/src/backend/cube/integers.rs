//! Lengths and segments in one buffer: `[lengths | ids of queries | ids of keys | bounds of query blocks
//! | bounds of key blocks | …]`, so that they take one binding. Bounds are the smallest and the largest
//! id of a block, by which kernels skip pairs of blocks without a common document; kernels with other
//! tiles have bounds of their own.

use super::*;
use crate::kernel::integers::{bound_segments, pack_integers};
use crate::kernel::visibility::{ExtentLaunch, OPEN};
use cubecl::prelude::CubeDim;

/// Tokens of the blocks that a kernel divides queries and keys into.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Blocks {
    pub queries: usize,
    pub keys: usize,
}

impl Blocks {
    /// Of a kernel whose tiles keep queries and stream keys.
    pub fn of_queries(tiles: &UnitTiles) -> Self {
        Self {
            queries: tiles.rows,
            keys: tiles.columns(),
        }
    }

    /// Of a kernel whose tiles keep keys and stream queries.
    pub fn of_keys(tiles: &UnitTiles) -> Self {
        Self {
            queries: tiles.columns(),
            keys: tiles.rows,
        }
    }
}

/// Where a kernel with these blocks finds the integers.
#[derive(Clone, Copy)]
pub(super) struct Places {
    blocks: Blocks,
    query_ids: usize,
    key_ids: usize,
    query_bounds: usize,
    key_bounds: usize,
}

impl Places {
    /// Lengths, window and places, as kernels take them.
    pub fn extent(&self, problem: &AttentionProblem) -> ExtentLaunch {
        let window = |side: Option<usize>| side.map_or(OPEN, |side| side.min(OPEN as usize) as i32);
        ExtentLaunch::new(
            problem.q_len as i32,
            problem.kv_len as i32,
            window(problem.window_left),
            window(problem.right()),
            i32::from(problem.is_bottom_right()),
            self.query_ids as u32,
            self.key_ids as u32,
            self.query_bounds as u32,
            self.key_bounds as u32,
            problem.q_len.div_ceil(self.blocks.queries) as u32,
            problem.kv_len.div_ceil(self.blocks.keys) as u32,
        )
    }
}

/// The packed integers, if any, and the places in them for every kind of blocks.
pub(super) fn prepare(
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    blocks: &[Blocks],
) -> (Option<CubeTensor>, Vec<Places>) {
    let AttentionProblem {
        batch,
        q_len,
        kv_len,
        ..
    } = *problem;
    let lengths = inputs.kv_lengths.as_option();
    let queries = inputs.query_segments.as_option();
    let keys = inputs.key_segments.as_option();

    let query_ids = if lengths.is_some() { batch } else { 0 };
    let key_ids = query_ids + batch * q_len;
    let mut end = key_ids + batch * kv_len;
    let mut reserve = |length: usize, block| {
        let start = end;
        end += 2 * batch * length.div_ceil(block);
        start
    };
    // Kernels with the same blocks share their bounds.
    let mut distinct: Vec<Places> = Vec::with_capacity(blocks.len());
    let places = blocks.iter().map(|blocks| {
        if let Some(places) = distinct.iter().find(|places| places.blocks == *blocks) {
            return *places;
        }
        let places = Places {
            blocks: *blocks,
            query_ids,
            key_ids,
            query_bounds: reserve(q_len, blocks.queries),
            key_bounds: reserve(kv_len, blocks.keys),
        };
        distinct.push(places);
        places
    });
    let places = places.collect();

    let packed = match (lengths, queries.zip(keys)) {
        (None, None) => None,
        (Some(lengths), None) => {
            if lengths.dtype == DType::I32 && (batch == 1 || lengths.meta.strides()[0] == 1) {
                Some(lengths.clone())
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
            for places in &distinct {
                let Blocks { queries, keys } = places.blocks;
                bound(
                    &packed,
                    query_ids,
                    places.query_bounds,
                    batch,
                    q_len,
                    queries,
                );
                bound(&packed, key_ids, places.key_bounds, batch, kv_len, keys);
            }
            Some(packed)
        }
    };
    (packed, places)
}

const UNITS: usize = 64;

/// Copies `count` integers, rows of `columns`, to `start`.
fn pack(source: &CubeTensor, packed: &CubeTensor, start: usize, columns: usize, count: usize) {
    let source = match source.meta.shape().num_dims() {
        1 => burn_cubecl::ops::reshape(source.clone(), Shape::new([count, 1])),
        _ => source.clone(),
    };
    let element = dtype_to_storage_type(source.dtype);
    // SAFETY: `count` is the number of elements of `source`, and the callers leave room for it from `start` on.
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

/// Writes the bounds of every block of `block` tokens, of `batch` sequences whose ids start at `ids`.
fn bound(
    packed: &CubeTensor,
    ids: usize,
    bounds: usize,
    batch: usize,
    length: usize,
    block: usize,
) {
    let blocks = length.div_ceil(block);
    let count = batch * blocks;
    // SAFETY: ids and bounds lie inside `packed`, sized for both by the caller.
    unsafe {
        bound_segments::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            packed.clone().into_tensor_arg(),
            ids as u32,
            bounds as u32,
            length as u32,
            blocks as u32,
            count as u32,
            block as u32,
        );
    }
}
