//! Lengths and segments in one buffer: `[lengths | ids of queries | ids of keys | bounds of query blocks
//! | bounds of key blocks | …]`, so that they take one binding. Bounds are the smallest and the largest
//! id of a block, and its ids' bits, by which kernels skip pairs of blocks without a common document, and, of the side that tiles
//! hold, the first and the last block that a tile has one in common with; kernels with other tiles have bounds of
//! their own. After the bounds of key blocks comes 0, from which cubes count the tiles that they take.

mod kernel;

use crate::AttentionProblem;
use crate::backend::AttentionInputs;
use crate::math::side::Side;
use crate::math::visibility::{BLOCK_BOUNDS, ExtentLaunch, OPEN};
use crate::passes::lengths::kernel::{bound_segments, pack_lengths_and_ids, span_segments};
use crate::tile::tiles::UnitTiles;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{cube_count, empty};
use cubecl::prelude::CubeDim;

/// Tokens of the blocks that a kernel divides queries and keys into, and whose are its tiles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub queries: usize,
    pub keys: usize,
    pub held: Side,
}

impl Blocks {
    /// Of a kernel whose tiles keep queries and stream keys.
    pub fn of_queries(tiles: &UnitTiles) -> Self {
        Self {
            queries: tiles.rows,
            keys: tiles.columns(),
            held: Side::Queries,
        }
    }

    /// Of a kernel whose tiles keep keys and stream queries.
    pub fn of_keys(tiles: &UnitTiles) -> Self {
        Self {
            queries: tiles.columns(),
            keys: tiles.rows,
            held: Side::Keys,
        }
    }
}

/// Where a kernel with these blocks finds the integers.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    blocks: Blocks,
    query_ids: usize,
    key_ids: usize,
    query_bounds: usize,
    key_bounds: usize,
}

impl Places {
    /// The places for a kernel that reads lengths but no segments.
    pub fn of_lengths() -> Self {
        Self {
            blocks: Blocks {
                queries: 1,
                keys: 1,
                held: Side::Queries,
            },
            query_ids: 0,
            key_ids: 0,
            query_bounds: 0,
            key_bounds: 0,
        }
    }

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
pub(crate) fn prepare(
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
    let most = Some(kv_len as i32);
    let queries = inputs.query_segments.as_option();
    let keys = inputs.key_segments.as_option();

    let query_ids = if lengths.is_some() { batch } else { 0 };
    let key_ids = query_ids + batch * q_len;
    let mut end = key_ids + batch * kv_len;
    let mut reserve = |blocks: usize, more: usize| {
        let start = end;
        end += BLOCK_BOUNDS * batch * blocks + more;
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
            query_bounds: reserve(q_len.div_ceil(blocks.queries), 0),
            key_bounds: reserve(kv_len.div_ceil(blocks.keys), 1),
        };
        distinct.push(places);
        places
    });
    let places = places.collect();

    let packed = match (lengths, queries.zip(keys)) {
        (None, None) => None,
        (Some(lengths), None) => Some(lengths_as_read(lengths, problem)),
        (lengths, Some((queries, keys))) => {
            let packed = empty(&inputs.query, [end], DType::I32);
            if let Some(lengths) = lengths {
                pack(lengths, &packed, 0, 1, batch, most);
            }
            pack(queries, &packed, query_ids, q_len, batch * q_len, None);
            pack(keys, &packed, key_ids, kv_len, batch * kv_len, None);
            for places in &distinct {
                let Blocks {
                    queries,
                    keys,
                    held,
                } = places.blocks;
                bound(
                    &packed,
                    query_ids,
                    places.query_bounds,
                    batch,
                    q_len,
                    queries,
                );
                bound(&packed, key_ids, places.key_bounds, batch, kv_len, keys);
                let of_queries = (places.query_bounds, q_len.div_ceil(queries));
                let of_keys = (places.key_bounds, kv_len.div_ceil(keys));
                let counter = places.key_bounds + BLOCK_BOUNDS * batch * of_keys.1;
                match held {
                    Side::Queries => span(&packed, batch, of_queries, of_keys, counter),
                    Side::Keys => span(&packed, batch, of_keys, of_queries, counter),
                }
            }
            Some(packed)
        }
    };
    (packed, places)
}

/// Whether kernels read the lengths of so many sequences where they are: else a launch writes them.
pub(crate) fn lie_as_read(lengths: &CubeTensor, batch: usize) -> bool {
    lengths.dtype == DType::I32 && (batch == 1 || lengths.meta.strides()[0] == 1)
}

/// The lengths of a problem's sequences as kernels read them.
pub(crate) fn lengths_as_read(lengths: &CubeTensor, problem: &AttentionProblem) -> CubeTensor {
    let batch = problem.batch;
    if lie_as_read(lengths, batch) {
        return lengths.clone();
    }
    let packed = empty(lengths, [batch], DType::I32);
    let most = Some(problem.kv_len as i32);
    pack(lengths, &packed, 0, 1, batch, most);
    packed
}

const UNITS: usize = 64;

/// Copies `count` integers, rows of `columns`, to `start`. Those that i32 may not hold are bounded by 0 and `largest` before,
/// if there is such a bound.
fn pack(
    source: &CubeTensor,
    packed: &CubeTensor,
    start: usize,
    columns: usize,
    count: usize,
    largest: Option<i32>,
) {
    let source = match source.meta.shape().num_dims() {
        1 => burn_cubecl::ops::reshape(source.clone(), Shape::new([count, 1])),
        _ => source.clone(),
    };
    let element = dtype_to_storage_type(source.dtype);
    let is_stationary = source.dtype == DType::I32 || source.dtype.size() < DType::I32.size();
    // SAFETY: `count` is the number of elements of `source`, and the callers leave room for it from `start` on.
    unsafe {
        pack_lengths_and_ids::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            source.into_tensor_arg(),
            packed.clone().into_tensor_arg(),
            start as u32,
            columns as u32,
            count as u32,
            largest.unwrap_or_default(),
            largest.is_some() && !is_stationary,
            element,
        );
    }
}

/// Writes which of the others each of the blocks may share a document with: where either's bounds start, and how many blocks a
/// sequence has. The counter starts at 0.
fn span(
    packed: &CubeTensor,
    batch: usize,
    (bounds, blocks): (usize, usize),
    (others, other_blocks): (usize, usize),
    counter: usize,
) {
    let count = batch * blocks;
    // SAFETY: the integers of all blocks lie inside `packed`, and were written before.
    unsafe {
        span_segments::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count),
            CubeDim::new_1d(UNITS as u32),
            packed.clone().into_tensor_arg(),
            bounds as u32,
            others as u32,
            blocks as u32,
            other_blocks as u32,
            count as u32,
            counter as u32,
            UNITS as u32,
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

#[cfg(test)]
mod tests;
