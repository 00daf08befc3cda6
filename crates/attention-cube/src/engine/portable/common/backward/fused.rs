//! Computes all three gradients (of query, key and value) in one kernel, for software drivers. Such a driver runs cubes
//! on the few cores of a CPU, so few cubes are enough.
//!
//! `splits` cubes share a KV head, and each of them processes every `splits`-th key tile. For each key tile, a cube
//! loops over all query blocks that see any of the tile's keys. For each pair of a key tile and a query block, the cube
//! adds to dK, to dV and to the cube's own partial dQ in memory. A second kernel adds the partial dQ of all cubes in a
//! fixed order, without atomics. S (the scores) and dP (the gradient of the probabilities) are computed once, so there
//! are 5 GEMMs. With a separate kernel for the query's gradient there would be 7.
//!
//! One loop runs all three gradient GEMMs, over operands in one buffer and gradients in another buffer. A single loop
//! keeps the kernel's code small. The code size matters, because a software driver's compile time grows with the square
//! of the number of loads and stores.
//!
//! A software driver silently stops a unit's loops after a fixed number of iterations. A launch therefore covers only a
//! [`Window`] of the tile pairs, and the host repeats the launch until all pairs are done.
//!
//! Budget: shared memory for one tile. A unit's registers first hold the unit's elements of S and dP. During the
//! gradient GEMMs, the registers hold up to 128 vectors of a gradient, for any head size. Global memory holds the
//! operands and `splits + 2` gradients in f32: the partial dQ of each split, dK and dV. Bound: loads, see
//! `tile_ops/direct.rs`.

use super::p_ds::{Pair, block_scores, pair_operands};
use crate::auxiliary::backward_kind::BackwardKind;
use crate::math::inputs::HeadSizes;
use crate::math::layout::{Rows, head_rows, operand, row_offset};
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{Scoring, TileAndBlock, block_mask_shows};
use crate::math::side::Side;
use crate::math::visibility::{
    blocks_meet, is_whole, seq_info, visible_keys, visible_queries, within_bounds,
};
use crate::problem::AttentionProblem;
use crate::tile_ops::direct::{SumTiling, add_iterations, add_transposed, store_transposed};
use crate::tile_ops::product::{new_stage, store_rounded};
use crate::tile_ops::tiles::UnitTiles;
use crate::tile_ops::vec4::Vec4;
use crate::types::device::SOFTWARE_ITERATIONS;
use cubecl::prelude::*;

/// The offsets of operands and gradients in the kernel's two buffers, in f32 elements. The operand buffer begins with the
/// query. The gradient buffer begins with the partial gradients of the query.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct OperandPlaces {
    pub key: usize,
    pub value: usize,
    pub output_gradient: usize,
    /// The number of elements from one row to the next row, in the query and in the key. `value_pitch` is the corresponding
    /// number for the value and for the output's gradient.
    pub head_pitch: u32,
    pub value_pitch: u32,
    /// The number of elements in one partial gradient of the query.
    pub query_gradient: usize,
    pub key_gradient: usize,
    pub value_gradient: usize,
}

/// The pairs of a key tile and a query block that one launch processes. The window holds a range of key tiles, a range
/// of query blocks, and one query head of each GQA group.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Window {
    pub first_tile: u32,
    pub end_tile: u32,
    pub first_block: i32,
    pub end_block: i32,
    pub group_head: u32,
    /// The index of the first gradient GEMM to compute, in the order dV, dK, dQ. `end_product` is the index after the last
    /// GEMM.
    pub first_product: u32,
    pub end_product: u32,
}

/// Returns the largest number of tile pairs that a cube may process in one launch within a software driver's iteration
/// limit.
pub(crate) fn pairs_per_launch(
    tiles: &UnitTiles,
    division: SumTiling,
    problem: &AttentionProblem,
) -> usize {
    let scores = problem.head_dim.div_ceil(4) + problem.value_dim.div_ceil(4);
    let scores = scores + problem.mask_search(1, tiles.columns(), tiles.rows);
    let product = add_iterations(division, tiles) + 1;
    (SOFTWARE_ITERATIONS / (scores + 3 * product + 2)).max(1)
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn all_gradients<M: Numeric, F: Float, N: Size>(
    operands: &Tensor<Vector<f32, N>>,
    rows: &Tensor<f32>,
    scoring: Scoring<M, F>,
    gradients: &mut Tensor<Vector<f32, N>>,
    grid: Grid,
    sizes: HeadSizes,
    offsets: OperandPlaces,
    window: Window,
    #[comptime] division: SumTiling,
    #[comptime] kind: BackwardKind,
    #[define(M, F)] _elements: [ElemType; 2],
    #[define(N)] _vector: usize,
) {
    let group = sizes.group;
    let head_dim = sizes.head_dim;
    let value_dim = sizes.value_dim;
    let index = CUBE_POS as u32;
    if index >= grid.cubes {
        terminate!();
    }
    let seq_lens = &scoring.seq_lens;
    let lengths_and_ids = &scoring.lengths_and_ids;
    let tiles = comptime!(kind.tiles);
    let has_masked = comptime!(kind.score.leaves_masked(&kind.structure));
    let work_tile = work_tile(&grid, index, false);
    let batch = work_tile.batch;
    let kv_head = work_tile.head;
    let seq_info = seq_info(seq_lens, lengths_and_ids, batch, kind.structure);

    let mut stage = new_stage::<f32>(tiles);
    let mut tile = Shared::<[Vec4]>::new_slice(comptime!(tiles.tile_vectors()));
    let mut lse_delta = Shared::<[Vec4]>::new_slice(comptime!(tiles.term_vectors()));
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns().max(tiles.rows)));
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));

    let block_size = comptime!(tiles.columns() as i32);
    let head = kv_head * group + window.group_head;
    let mut key_tile = window.first_tile + work_tile.split;
    while key_tile < window.end_tile {
        let first_row = (key_tile * comptime!(tiles.rows as u32)) as i32;
        let end_row = min(first_row + comptime!(tiles.rows as i32), seq_lens.kv_len);
        // Leave out keys past the length of the sequence, because no query sees these keys.
        let exist = min(end_row, seq_info.length);
        let full = first_row + comptime!(tiles.rows as i32) <= exist;
        let queries = visible_queries(&seq_info, first_row, exist - 1i32, full);

        let kv_plane = (batch * grid.heads + kv_head) as usize * seq_lens.kv_len as usize;
        let key_at = offsets.key + kv_plane * offsets.head_pitch as usize;
        let value_at = offsets.value + kv_plane * offsets.value_pitch as usize;
        let key = operand(
            operands,
            buffer_rows(key_at, offsets.head_pitch, first_row, exist, head_dim),
        );
        let value = operand(
            operands,
            buffer_rows(value_at, offsets.value_pitch, first_row, exist, value_dim),
        );
        let key_gradient_rows = buffer_rows(
            offsets.key_gradient + kv_plane * head_dim as usize,
            head_dim,
            first_row,
            end_row,
            head_dim,
        );
        let value_gradient_rows = buffer_rows(
            offsets.value_gradient + kv_plane * value_dim as usize,
            value_dim,
            first_row,
            end_row,
            value_dim,
        );
        let blocks = within_bounds(
            max(queries.first / block_size, window.first_block),
            min(block_count(queries.end, block_size), window.end_block),
            seq_lens,
            lengths_and_ids,
            batch,
            key_tile,
            Side::Keys,
            kind.structure,
        );
        let plane = (batch * grid.heads * group + head) as usize * seq_lens.q_len as usize;

        let query_rows = buffer_rows(
            plane * offsets.head_pitch as usize,
            offsets.head_pitch,
            queries.first,
            queries.end,
            head_dim,
        );
        let query = operand(operands, query_rows);
        let output_gradient_rows = buffer_rows(
            offsets.output_gradient + plane * offsets.value_pitch as usize,
            offsets.value_pitch,
            queries.first,
            queries.end,
            value_dim,
        );
        let output_gradient = operand(operands, output_gradient_rows);
        let query_gradient_rows = buffer_rows(
            work_tile.split as usize * offsets.query_gradient + plane * head_dim as usize,
            head_dim,
            0i32,
            seq_lens.q_len,
            head_dim,
        );
        let mut block = blocks.first;
        while block < blocks.end {
            let visited = blocks_meet(
                seq_lens,
                lengths_and_ids,
                batch,
                block as u32,
                key_tile,
                kind.structure,
            );
            let visited = if comptime!(kind.structure.has_block_mask()) {
                let pair = TileAndBlock {
                    batch,
                    first_head: head,
                    last_head: head,
                    first_query: block * block_size,
                    last_query: (block + 1i32) * block_size - 1i32,
                    first_key: first_row,
                    last_key: end_row - 1i32,
                };
                visited && block_mask_shows(&scoring, &pair, kind.structure)
            } else {
                visited
            };
            if visited {
                let first = block * block_size;
                let pair = Pair {
                    batch,
                    head,
                    first_key: first_row,
                    first_query: first,
                    whole: is_whole(
                        &queries,
                        first,
                        seq_lens,
                        lengths_and_ids,
                        batch,
                        block as u32,
                        key_tile,
                        block_size,
                        kind.structure,
                    ),
                };
                let pair_operands = pair_operands(query, key, value, output_gradient);
                block_scores(
                    &pair_operands,
                    rows,
                    &scoring,
                    &seq_info,
                    &pair,
                    &mut lse_delta,
                    &mut stage,
                    &mut s,
                    &mut dp,
                    kind,
                );
                let last = min(first + block_size, seq_lens.q_len) - 1i32;
                let keys = visible_keys(&seq_info, first, last, false, kind.structure);
                let seen_rows = buffer_rows(
                    key_at,
                    offsets.head_pitch,
                    max(first_row, keys.first),
                    min(exist, keys.end),
                    head_dim,
                );
                if window.first_product > 0u32 {
                    #[unroll]
                    for index in 0..comptime!(tiles.scores_per_unit()) {
                        s[index] = dp[index];
                    }
                }
                for product in window.first_product..window.end_product {
                    // Wait until all units have read the previous GEMM's tile, because this GEMM overwrites the tile in
                    // shared memory.
                    sync_cube();
                    if product < 2u32 {
                        store_transposed(&s, &mut tile, tiles);
                    } else {
                        store_rounded::<f32>(&s, &mut tile, 0usize, tiles);
                    }
                    #[unroll]
                    for index in 0..comptime!(tiles.scores_per_unit()) {
                        s[index] = dp[index];
                    }
                    let b_rows = chosen(product, &output_gradient_rows, &query_rows, &seen_rows);
                    let target_rows = chosen(
                        product,
                        &value_gradient_rows,
                        &key_gradient_rows,
                        &query_gradient_rows,
                    );
                    add_transposed(
                        &tile,
                        &operand(operands, b_rows),
                        select(product == 2u32, first_row, first),
                        &mut used,
                        gradients,
                        &target_rows,
                        select(product == 2u32, first, first_row),
                        division,
                        has_masked,
                        tiles,
                    );
                }
            }
            block += 1i32;
        }
        key_tile += grid.splits;
    }
}

/// Describes rows of a buffer: the first row starts at element `base`, and rows are `row_stride` elements apart.
/// Kernels read only the rows `first..end`.
#[cube]
fn buffer_rows(base: usize, row_stride: u32, first: i32, end: i32, columns: u32) -> Rows {
    Rows {
        base,
        row_stride: row_stride as usize,
        column_stride: 1usize,
        first,
        end,
        fallback: u32::new(0),
        columns,
        head_length: 0u32,
        head_stride: 0usize,
    }
}

/// Returns `first` if `which` is 0, `second` if `which` is 1, and `third` if `which` is 2.
#[cube]
fn chosen(which: u32, first: &Rows, second: &Rows, third: &Rows) -> Rows {
    let a = which == 0u32;
    let b = which == 1u32;
    Rows {
        base: select(a, first.base, select(b, second.base, third.base)),
        row_stride: select(
            a,
            first.row_stride,
            select(b, second.row_stride, third.row_stride),
        ),
        column_stride: 1usize,
        first: select(a, first.first, select(b, second.first, third.first)),
        end: select(a, first.end, select(b, second.end, third.end)),
        fallback: u32::new(0),
        columns: select(a, first.columns, select(b, second.columns, third.columns)),
        head_length: 0u32,
        head_stride: 0usize,
    }
}

/// Copies the rows of a tensor to a packed f32 buffer, in which rows start `pitch` elements apart. Each unit copies one
/// vector.
///
/// # Shapes
/// `source` is `[batch, heads, length, columns]`. `operands` is the packed buffer, with one dimension. The kernel
/// writes the first row at element `first` of `operands`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn pack_operand<E: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    operands: &mut Tensor<Vector<f32, N>>,
    first: usize,
    vectors: usize,
    heads: u32,
    length: u32,
    columns: u32,
    pitch: u32,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let index = ABSOLUTE_POS;
    if index >= vectors {
        terminate!();
    }
    let size = source.vector_size();
    let row_vectors = columns as usize / size;
    let column = index % row_vectors * size;
    let row = (index / row_vectors) as u32;
    let plane = row / length;
    let rows = head_rows(
        source,
        plane / heads,
        plane % heads,
        0i32,
        length as i32,
        columns,
    );
    let offset = row_offset(&rows, row % length, false);
    let from = offset + column * rows.column_stride;
    let to = first + row as usize * pitch as usize + column;
    operands[to / size] = Vector::cast_from(source[from / size]);
}
