//! Packs sequence lengths, segment ids and the queries' key intervals into one i32 buffer, so that kernels need only
//! one binding: `[lengths | records of queries | ids of keys | bounds of query blocks | bounds of key blocks | …]`.
//!
//! A sequence has up to two lengths: its number of keys, and then its number of queries.
//!
//! The record of a query holds the query's segment id (if any), then the first key and the end of each key interval.
//!
//! The bounds of a block are the smallest and the largest segment id of the block, and a bit set of the block's ids
//! modulo 32. Kernels skip a pair of a query block and a key block if the bounds show no common segment.
//!
//! An attention kernel keeps a tile, which is one block of its stationary side (queries or keys). The kernel streams
//! blocks of the opposite side. The bounds of each block of the stationary side also hold one range of opposite blocks.
//! The range covers each opposite block that segments and intervals do not hide from the tile.
//!
//! A problem with key intervals has either one interval per query or two. In both cases, the bounds of a query block
//! hold two more ranges of key blocks, for the first intervals of the block's queries. The first range covers each key
//! block with a key in at least one of these intervals. The second range covers each key block that lies entirely in
//! all of these intervals. With two intervals per query, two further ranges hold the same for the second intervals.
//!
//! Kernels with different tile sizes have separate bounds. The bounds of key blocks are followed by a counter,
//! initially 0. Persistent cubes claim tiles by incrementing this counter. The counter is followed by the order in which
//! cubes take the tiles of each sequence (see [`crate::math::longest_first`]).

mod kernel;

use crate::auxiliary::lengths::kernel::{
    bound_intervals, bound_segments, order_blocks, pack_lengths_and_ids, span_blocks,
};
use crate::kernel_args::structure;
use crate::math::side::Side;
use crate::math::visibility::{BLOCK_BOUNDS, OPEN, SeqLensLaunch, Structure};
use crate::problem::AttentionProblem;
use crate::tile_ops::tiles::UnitTiles;
use crate::types::tensors::AttentionInputs;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{cube_count, empty};
use cubecl::prelude::CubeDim;

/// The block sizes of a kernel in tokens, and the operand (queries or keys) that the kernel's tiles keep. The kernel streams
/// blocks of the opposite operand.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub queries: usize,
    pub keys: usize,
    pub stationary_side: Side,
    /// True if cubes take the tiles of queries in the order of [`crate::math::longest_first`].
    pub longest_first: bool,
}

impl Blocks {
    /// Returns the block sizes of a kernel that keeps a tile of queries and streams keys.
    pub fn of_queries(tiles: &UnitTiles) -> Self {
        Self {
            queries: tiles.rows,
            keys: tiles.columns(),
            stationary_side: Side::Queries,
            longest_first: false,
        }
    }

    /// Returns the block sizes of a kernel that keeps a tile of keys and streams queries.
    pub fn of_keys(tiles: &UnitTiles) -> Self {
        Self {
            queries: tiles.columns(),
            keys: tiles.rows,
            stationary_side: Side::Keys,
            longest_first: false,
        }
    }
}

/// The offsets of segment ids and block bounds in the packed buffer, for the block sizes of one kernel.
#[derive(Clone, Copy)]
pub(crate) struct BoundsOffsets {
    blocks: Blocks,
    query_ids: usize,
    key_ids: usize,
    query_bounds: usize,
    key_bounds: usize,
}

impl BoundsOffsets {
    /// Returns the offsets in the packed buffer for a kernel that reads lengths but no segments.
    pub fn of_lengths() -> Self {
        Self {
            blocks: Blocks {
                queries: 1,
                keys: 1,
                stationary_side: Side::Queries,
                longest_first: false,
            },
            query_ids: 0,
            key_ids: 0,
            query_bounds: 0,
            key_bounds: 0,
        }
    }

    /// Returns the problem's lengths and window, together with the offsets in the packed buffer, as kernel arguments.
    pub fn seq_lens(&self, problem: &AttentionProblem) -> SeqLensLaunch {
        let window = |side: Option<usize>| side.map_or(OPEN, |side| side.min(OPEN as usize) as i32);
        SeqLensLaunch::new(
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

/// Packs the lengths, segment ids and intervals of the problem. Returns the packed buffer, and the offsets for each of the
/// given block sizes. The buffer is `None` if the problem has no lengths, segment ids or intervals.
pub(crate) fn prepare(
    inputs: &AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    blocks: &[Blocks],
) -> (Option<CubeTensor>, Vec<BoundsOffsets>) {
    let AttentionProblem {
        batch,
        q_len,
        kv_len,
        ..
    } = *problem;
    let lengths = [
        inputs
            .kv_lengths
            .as_option()
            .map(|lengths| (lengths, kv_len)),
        inputs
            .query_lengths
            .as_option()
            .map(|lengths| (lengths, q_len)),
    ];
    let lengths: Vec<(&CubeTensor, usize)> = lengths.into_iter().flatten().collect();
    let segments = inputs
        .query_segments
        .as_option()
        .zip(inputs.key_segments.as_option());
    let intervals = inputs.intervals.as_option();
    // The kernels that this function launches do not depend on the flags for mask and lengths. Clear these flags, so
    // that problems that differ only in mask or lengths share compiled kernels.
    let structure = Structure {
        lengths: false,
        lengths_ahead: false,
        query_lengths: false,
        mask: false,
        mask_block: [1, 1],
        ..structure(problem)
    };

    let query_ids = lengths.len() * batch;
    let key_ids = query_ids + batch * q_len * structure.query_record();
    let mut end = key_ids + usize::from(structure.segments) * batch * kv_len;
    let mut reserve = |values: usize| {
        let start = end;
        end += values;
        start
    };
    // Two kernels share one set of bounds if their block sizes are equal and their tiles keep the same operand (queries
    // or keys).
    let mut distinct_sizes: Vec<BoundsOffsets> = Vec::with_capacity(blocks.len());
    let offsets = blocks.iter().map(|blocks| {
        if let Some(offsets) = distinct_sizes
            .iter()
            .find(|offsets| offsets.blocks == *blocks)
        {
            return *offsets;
        }
        let offsets = BoundsOffsets {
            blocks: *blocks,
            query_ids,
            key_ids,
            query_bounds: reserve(
                structure.query_block_bounds() * batch * q_len.div_ceil(blocks.queries),
            ),
            key_bounds: {
                let order = match blocks.longest_first {
                    true => batch * q_len.div_ceil(blocks.queries),
                    false => 0,
                };
                reserve(BLOCK_BOUNDS * batch * kv_len.div_ceil(blocks.keys) + 1 + order)
            },
        };
        distinct_sizes.push(offsets);
        offsets
    });
    let offsets = offsets.collect();

    if !structure.has_bounds() {
        match lengths[..] {
            [] => return (None, offsets),
            [(lengths, most)] => {
                return (Some(contiguous_integers(lengths, most)), offsets);
            }
            _ => {}
        }
    }
    let packed = empty(&inputs.query, [end], DType::I32);
    for (index, (of_sequences, most)) in lengths.iter().enumerate() {
        let most = Some(*most as i32);
        pack(of_sequences, &packed, index, 1, batch, most, lengths.len());
    }
    if !structure.has_bounds() {
        return (Some(packed), offsets);
    }
    if let Some((queries, keys)) = segments {
        let record = structure.query_record();
        pack(
            queries,
            &packed,
            query_ids,
            q_len,
            batch * q_len,
            None,
            record,
        );
        pack(keys, &packed, key_ids, kv_len, batch * kv_len, None, 1);
    }
    for offsets in &distinct_sizes {
        bound_blocks(&packed, offsets, intervals, problem, structure);
    }
    (Some(packed), offsets)
}

/// Writes the bounds of all query blocks and all key blocks, for the block sizes of one kernel.
fn bound_blocks(
    packed: &CubeTensor,
    offsets: &BoundsOffsets,
    intervals: Option<&CubeTensor>,
    problem: &AttentionProblem,
    structure: Structure,
) {
    let AttentionProblem {
        batch,
        q_len,
        kv_len,
        ..
    } = *problem;
    let Blocks {
        queries,
        keys,
        stationary_side,
        longest_first,
    } = offsets.blocks;
    if structure.segments {
        let of_queries = (structure.query_record(), structure.query_block_bounds());
        bound(
            packed,
            offsets.query_ids,
            offsets.query_bounds,
            batch,
            q_len,
            queries,
            of_queries,
        );
        bound(
            packed,
            offsets.key_ids,
            offsets.key_bounds,
            batch,
            kv_len,
            keys,
            (1, BLOCK_BOUNDS),
        );
    }
    let of_queries = (offsets.query_bounds, q_len.div_ceil(queries));
    let of_keys = (offsets.key_bounds, kv_len.div_ceil(keys));
    let counter = offsets.key_bounds + BLOCK_BOUNDS * batch * of_keys.1;
    let spans_of_records =
        structure.intervals > 0 && !structure.segments && stationary_side == Side::Queries;
    if let Some(intervals) = intervals {
        bound_records(
            intervals,
            packed,
            offsets,
            counter,
            spans_of_records,
            problem,
            structure,
        );
    }
    let (own, others) = match stationary_side {
        Side::Queries => (of_queries, of_keys),
        Side::Keys => (of_keys, of_queries),
    };
    if !spans_of_records {
        span(
            packed,
            batch,
            own,
            others,
            counter,
            stationary_side,
            structure,
        );
    }
    if longest_first {
        order(packed, batch, of_queries, counter + 1, structure);
    }
}

/// True if kernels can read this list or table of integers without a copy: its integers are i32, and its rows are contiguous.
pub(crate) fn is_as_read(integers: &CubeTensor) -> bool {
    let last = integers.meta.shape().num_dims() - 1;
    let contiguous = integers.meta.shape()[last] == 1 || integers.meta.strides()[last] == 1;
    integers.dtype == DType::I32 && contiguous
}

/// Returns the number of keys of each sequence in the layout that kernels read: contiguous i32.
pub(crate) fn lengths_as_read(lengths: &CubeTensor, problem: &AttentionProblem) -> CubeTensor {
    contiguous_integers(lengths, problem.kv_len)
}

/// Returns integers in the layout that kernels read: i32, with contiguous rows. A conversion from a type that may
/// exceed i32 clamps the integers to `0..=most`. The clamp changes no result, because kernels treat an integer outside
/// of this range like the nearest integer in the range.
pub(crate) fn contiguous_integers(integers: &CubeTensor, most: usize) -> CubeTensor {
    if is_as_read(integers) {
        return integers.clone();
    }
    let shape = integers.meta.shape().clone();
    let columns = match shape.num_dims() {
        1 => 1,
        dims => shape[dims - 1],
    };
    let count = shape.num_elements();
    let packed = empty(integers, [count], DType::I32);
    pack(integers, &packed, 0, columns, count, Some(most as i32), 1);
    burn_cubecl::ops::reshape(packed, shape)
}

const UNITS: usize = 64;

/// Copies `count` integers of `source`, with `columns` integers per row, to the packed buffer, starting at offset
/// `start`. In the buffer, consecutive integers are `record` elements apart. With `largest`, integers of a type that
/// may exceed i32 are clamped to `0..=largest`.
fn pack(
    source: &CubeTensor,
    packed: &CubeTensor,
    start: usize,
    columns: usize,
    count: usize,
    largest: Option<i32>,
    record: usize,
) {
    let source = match source.meta.shape().num_dims() {
        1 => burn_cubecl::ops::reshape(source.clone(), Shape::new([count, 1])),
        _ => source.clone(),
    };
    let element = dtype_to_storage_type(source.dtype);
    let fits_i32 = source.dtype == DType::I32 || source.dtype.size() < DType::I32.size();
    // SAFETY: `count` is the number of elements of `source`, and the callers reserve `count` records, starting at
    // `start`.
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
            largest.is_some() && !fits_i32,
            record as u32,
            element,
        );
    }
}

/// Copies the key intervals of all queries, `[batch, q_len, 2 · intervals]`, to the queries' records. Also writes, for
/// each query block, the ranges of key blocks that follow from the key intervals of the block's queries.
/// The first intervals of the queries give two ranges, and the second intervals, if any, give two more. See
/// `bound_intervals`. If `spans`, the function also does the work of [`span`] for query blocks.
fn bound_records(
    intervals: &CubeTensor,
    packed: &CubeTensor,
    offsets: &BoundsOffsets,
    counter: usize,
    spans: bool,
    problem: &AttentionProblem,
    structure: Structure,
) {
    let blocks = problem.q_len.div_ceil(offsets.blocks.queries);
    let count = problem.batch * blocks;
    // SAFETY: `intervals` has elements for each query of each sequence. Records and bounds of all queries lie inside
    // `packed`, because `prepare` has allocated `packed` for records and bounds.
    unsafe {
        bound_intervals::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count),
            CubeDim::new_1d(UNITS as u32),
            intervals.clone().into_tensor_arg(),
            packed.clone().into_tensor_arg(),
            offsets.query_ids as u32,
            offsets.query_bounds as u32,
            problem.q_len as u32,
            blocks as u32,
            count as u32,
            counter as u32,
            problem.kv_len as i32,
            offsets.blocks.queries as u32,
            offsets.blocks.keys as i32,
            spans,
            intervals.dtype.size() < DType::I32.size(),
            structure,
            UNITS as u32,
            dtype_to_storage_type(intervals.dtype),
        );
    }
}

/// Writes the range of opposite blocks for each block of `side` (queries or keys). Also sets the counter at offset
/// `counter` to 0. Persistent cubes claim tiles by incrementing this counter.
///
/// `(bounds, blocks)` holds the offset of the bounds of `side`, and the number of blocks of `side` per sequence.
/// `(others, other_blocks)` holds the offset and the number of blocks for the opposite side.
fn span(
    packed: &CubeTensor,
    batch: usize,
    (bounds, blocks): (usize, usize),
    (others, other_blocks): (usize, usize),
    counter: usize,
    side: Side,
    structure: Structure,
) {
    let count = batch * blocks;
    // SAFETY: cubes whose index is not below `count` stop at once. All other cubes access `packed` only at the bounds of
    // existing blocks and at `counter`. The caller has reserved these elements.
    unsafe {
        span_blocks::launch_unchecked(
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
            side,
            structure,
            UNITS as u32,
        );
    }
}

/// Writes the order in which cubes take the tiles of each sequence, at offset `order`. `(bounds, blocks)` holds the
/// offset of the bounds of query blocks, and the number of query blocks per sequence. A sequence with one tile needs no
/// order.
fn order(
    packed: &CubeTensor,
    batch: usize,
    (bounds, blocks): (usize, usize),
    order: usize,
    structure: Structure,
) {
    if blocks <= 1 {
        return;
    }
    let count = batch * blocks;
    // SAFETY: cubes whose index is not below `count` stop at once. All other cubes access `packed` only at the bounds of
    // existing blocks and at the `count` elements from `order` on. The caller has reserved these elements.
    unsafe {
        order_blocks::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count),
            CubeDim::new_1d(UNITS as u32),
            packed.clone().into_tensor_arg(),
            bounds as u32,
            order as u32,
            blocks as u32,
            count as u32,
            structure,
            UNITS as u32,
        );
    }
}

/// Writes the smallest segment id, the largest segment id, and the bit set of ids modulo 32 of every block of `block`
/// tokens. The ids start at offset `ids` of the packed buffer, `record` elements apart. The bounds start at offset `bounds`,
/// with `block_bounds` values per block.
fn bound(
    packed: &CubeTensor,
    ids: usize,
    bounds: usize,
    batch: usize,
    length: usize,
    block: usize,
    (record, block_bounds): (usize, usize),
) {
    let blocks = length.div_ceil(block);
    let count = batch * blocks;
    // SAFETY: the kernel accesses `packed` only at the ids and bounds of `count` blocks. The caller has reserved these
    // elements.
    unsafe {
        bound_segments::launch_unchecked(
            &packed.client,
            cube_count(&packed.client, count),
            CubeDim::new_1d(UNITS as u32),
            packed.clone().into_tensor_arg(),
            ids as u32,
            bounds as u32,
            length as u32,
            blocks as u32,
            count as u32,
            block as u32,
            record as u32,
            block_bounds as u32,
            UNITS as u32,
        );
    }
}

#[cfg(test)]
mod tests;
