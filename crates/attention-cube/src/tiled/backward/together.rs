//! All three gradients in one kernel, where few cubes are enough: a software driver's few processors.
//!
//! A cube takes every `splits`-th tile of a head's keys, one after the other, and with each tile all queries
//! that see any of it. What a pair of tiles adds to the gradients it adds in memory: to its own keys' and
//! values', and to a part of the query's which no other cube touches. The parts are summed afterwards, so
//! that there are neither atomics nor an order left to chance. S and dP are computed once: 5 products
//! instead of 7.
//!
//! The three products that give gradients are one loop over operands in one buffer and gradients in another:
//! what such a driver's compiler takes grows with the square of the loads and stores in a kernel, and it does
//! not skip what a branch leaves out.
//!
//! Such a driver also ends a unit's loops after so many iterations in all, silently. So a launch covers a
//! [`Window`] of the pairs, and launches follow each other until all are done.
//!
//! Budget: shared memory for one tile; registers a unit: S and dP, then up to 128 vectors of a
//! gradient, whatever the head size; memory: the operands and `splits + 2` gradients in f32. Bound by loads, see
//! `tile/direct.rs`.

use super::key_value::{Pair, block_scores};
use crate::device::SOFTWARE_ITERATIONS;
use crate::math::layout::{Rows, head_rows, operand, row_offset};
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{ScoreArguments, scoring};
use crate::math::side::Side;
use crate::math::visibility::{
    Extent, is_whole, segments_meet, sight, visible_keys, visible_queries, within_segments,
};
use crate::passes::backward::BackwardKind;
use crate::tile::direct::{Division, add_iterations, add_transposed, store_transposed};
use crate::tile::product::{Vec4, new_stage, store_rounded};
use crate::tile::tiles::UnitTiles;
use cubecl::prelude::*;

/// Where the operands lie in their buffer, after the query, and the gradients in theirs, after the parts of
/// the query's.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct OperandPlaces {
    pub key: usize,
    pub value: usize,
    pub output_gradient: usize,
    /// Elements from a row of the query or of a key to the next, and of the others.
    pub head_pitch: u32,
    pub value_pitch: u32,
    /// Elements of a part of the query's gradient.
    pub query_gradient: usize,
    pub key_gradient: usize,
    pub value_gradient: usize,
}

/// The pairs of tiles of one launch: these tiles of keys with these blocks of queries, for one query head of
/// each group.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Window {
    pub first_tile: u32,
    pub end_tile: u32,
    pub first_block: i32,
    pub end_block: i32,
    pub group_head: u32,
    /// Of the values' gradient, the keys' and the query's, in this order, the first that is wanted, and one past the last.
    pub first_product: u32,
    pub end_product: u32,
}

/// Pairs of tiles that a cube may take in one launch.
pub(crate) fn pairs_per_launch(
    tiles: &UnitTiles,
    division: Division,
    head_dim: usize,
    value_dim: usize,
) -> usize {
    let scores = head_dim.div_ceil(4) + value_dim.div_ceil(4);
    let product = add_iterations(division, tiles) + 1;
    (SOFTWARE_ITERATIONS / (scores + 3 * product + 2)).max(1)
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn all_gradients<M: Numeric, F: Float, N: Size>(
    operands: &Tensor<Vector<f32, N>>,
    rows: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    gradients: &mut Tensor<Vector<f32, N>>,
    grid: Grid,
    extent: Extent,
    score: ScoreArguments,
    group: u32,
    head_dim: u32,
    value_dim: u32,
    places: OperandPlaces,
    window: Window,
    #[comptime] division: Division,
    #[comptime] kind: BackwardKind,
    #[define(M)] _mask_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(N)] _vector: usize,
) {
    let index = CUBE_POS as u32;
    if index >= grid.cubes {
        terminate!();
    }
    let scoring = scoring(extent, lengths_and_ids, mask, bias, score);
    let extent = &scoring.extent;
    let lengths_and_ids = &scoring.lengths_and_ids;
    let tiles = comptime!(kind.tiles);
    let has_masked = comptime!(kind.score.leaves_masked(&kind.structure));
    let work_tile = work_tile(&grid, index, false);
    let batch = work_tile.batch;
    let kv_head = work_tile.head;
    let sight = sight(extent, lengths_and_ids, batch, kind.structure);

    let mut stage = new_stage::<f32>(tiles);
    let mut tile = Shared::<[Vec4]>::new_slice(comptime!(tiles.tile_vectors()));
    let mut terms = Shared::<[Vec4]>::new_slice(comptime!(tiles.term_vectors()));
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns().max(tiles.rows)));
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));

    let block_size = comptime!(tiles.columns() as i32);
    let head = kv_head * group + window.group_head;
    let mut key_tile = window.first_tile + work_tile.split;
    while key_tile < window.end_tile {
        let first_row = (key_tile * comptime!(tiles.rows as u32)) as i32;
        let end_row = min(first_row + comptime!(tiles.rows as i32), extent.kv_len);
        // Keys past the sequence's length are seen by nobody.
        let exist = min(end_row, sight.length);
        let full = first_row + comptime!(tiles.rows as i32) <= exist;
        let queries = visible_queries(&sight, first_row, exist - 1i32, full);

        let kv_plane = (batch * grid.heads + kv_head) as usize * extent.kv_len as usize;
        let key_at = places.key + kv_plane * places.head_pitch as usize;
        let value_at = places.value + kv_plane * places.value_pitch as usize;
        let key = operand(
            operands,
            buffer_rows(key_at, places.head_pitch, first_row, exist, head_dim),
        );
        let value = operand(
            operands,
            buffer_rows(value_at, places.value_pitch, first_row, exist, value_dim),
        );
        let key_gradient_rows = buffer_rows(
            places.key_gradient + kv_plane * head_dim as usize,
            head_dim,
            first_row,
            end_row,
            head_dim,
        );
        let value_gradient_rows = buffer_rows(
            places.value_gradient + kv_plane * value_dim as usize,
            value_dim,
            first_row,
            end_row,
            value_dim,
        );
        let blocks = within_segments(
            max(queries.first / block_size, window.first_block),
            min(block_count(queries.end, block_size), window.end_block),
            extent,
            lengths_and_ids,
            batch,
            key_tile,
            Side::Keys,
            kind.structure,
        );
        let plane = (batch * grid.heads * group + head) as usize * extent.q_len as usize;

        let query_rows = buffer_rows(
            plane * places.head_pitch as usize,
            places.head_pitch,
            queries.first,
            queries.end,
            head_dim,
        );
        let query = operand(operands, query_rows);
        let output_gradient_rows = buffer_rows(
            places.output_gradient + plane * places.value_pitch as usize,
            places.value_pitch,
            queries.first,
            queries.end,
            value_dim,
        );
        let output_gradient = operand(operands, output_gradient_rows);
        let query_gradient_rows = buffer_rows(
            work_tile.split as usize * places.query_gradient + plane * head_dim as usize,
            head_dim,
            0i32,
            extent.q_len,
            head_dim,
        );
        let mut block = blocks.first;
        while block < blocks.end {
            let visited = segments_meet(
                extent,
                lengths_and_ids,
                batch,
                block as u32,
                key_tile,
                kind.structure,
            );
            if visited {
                let first = block * block_size;
                let pair = Pair {
                    batch,
                    head,
                    first_key: first_row,
                    first_query: first,
                    whole: is_whole(&queries, first, block_size, kind.structure),
                };
                block_scores(
                    &query,
                    &key,
                    &value,
                    &output_gradient,
                    rows,
                    &scoring,
                    &sight,
                    &pair,
                    &mut terms,
                    &mut stage,
                    &mut s,
                    &mut dp,
                    kind,
                );
                let last = min(first + block_size, extent.q_len) - 1i32;
                let keys = visible_keys(&sight, first, last, false);
                let seen_rows = buffer_rows(
                    key_at,
                    places.head_pitch,
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
                    // Before this tile takes the last one's place.
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

/// Rows `row_stride` elements apart from `base` on, of which `first..end` may be read.
#[cube]
fn buffer_rows(base: usize, row_stride: u32, first: i32, end: i32, columns: u32) -> Rows {
    Rows {
        base,
        row_stride: row_stride as usize,
        column_stride: 1usize,
        first,
        end,
        columns,
        head_length: 0u32,
        head_stride: 0usize,
    }
}

/// The `which`-th of three.
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
        columns: select(a, first.columns, select(b, second.columns, third.columns)),
        head_length: 0u32,
        head_stride: 0usize,
    }
}

/// Copies a tensor's rows to `pitch` elements apart, in f32, a vector a unit.
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
