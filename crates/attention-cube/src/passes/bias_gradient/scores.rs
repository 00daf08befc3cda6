//! The bias's gradient: for a tile of the bias, the sum of `ds` over everything it is broadcast along.
//!
//! Budget: the stage of the forward and 16 bytes a unit of shared memory; registers a unit:
//! `12 · rows_per_unit`. Work: `2 · rows · columns · (head_dim + value_dim)` FLOP a tile of scores, for
//! every tile of scores. A bias broadcast along queries leaves little to run side by side: cubes take parts of the sum then, in
//! the grid's splits, which `sum_parts` sums in their order. One that is broadcast along keys needs no scores:
//! `constant_bias_gradient`.

use crate::math::gradient::score_gradient;
use crate::math::layout::head_operand;
use crate::math::rounding::rounded;
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{Place, ScoreArguments, is_visible, scoring};
use crate::math::visibility::{Extent, is_whole, segments_meet, sight, visible_keys};
use crate::passes::backward::BackwardKind;
use crate::passes::delta::kernel::row_terms_of;
use crate::tile::product::{multiply_transposed, new_stage};
use crate::tile::score_places::{tile_column, tile_row};
use cubecl::prelude::*;

/// The dimensions that the bias is broadcast along, known when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Broadcast {
    pub batch: bool,
    pub heads: bool,
    pub queries: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn bias_gradient<E: Float, M: Numeric, F: Float, G: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    rows: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    gradient: &mut Tensor<G>,
    grid: Grid,
    extent: Extent,
    score: ScoreArguments,
    batches: u32,
    q_heads: u32,
    group: u32,
    head_dim: u32,
    value_dim: u32,
    key_tiles: u32,
    #[comptime] broadcast: Broadcast,
    #[comptime] kind: BackwardKind,
    #[define(E)] _element: ElemType,
    #[define(M)] _mask_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(G)] _gradient_element: ElemType,
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
    let row_size = comptime!(tiles.rows as i32);
    let column_size = comptime!(tiles.columns() as i32);
    // The grid counts tiles, heads and sequences of the bias itself, which is 1 wide where it is broadcast.
    let work_tile = work_tile(&grid, index, false);
    let own_row_tile = (work_tile.tile / key_tiles) as i32;
    let own_key_tile = (work_tile.tile % key_tiles) as i32;

    // What the tile's numbers are summed over.
    let mut row_tiles = 1u32;
    if comptime!(broadcast.queries) {
        row_tiles = block_count(extent.q_len, row_size) as u32;
    }
    let mut heads = 1u32;
    if comptime!(broadcast.heads) {
        heads = q_heads;
    }
    let mut summed = row_tiles * heads;
    if comptime!(broadcast.batch) {
        summed *= batches;
    }

    let mut stage = new_stage::<f32>(tiles);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(tiles.sum_floats()));
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut sum = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    #[unroll]
    for index in 0..comptime!(tiles.scores_per_unit()) {
        sum[index] = 0.0f32;
    }
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);

    let first = own_key_tile * column_size;
    let mut item = work_tile.split;
    while item < summed {
        let row_tile = own_row_tile + (item % row_tiles) as i32;
        let head = work_tile.head + item / row_tiles % heads;
        let batch = work_tile.batch + item / row_tiles / heads;
        let kv_head = head / group;
        let sight = sight(extent, lengths_and_ids, batch, kind.structure);
        let first_row = row_tile * row_size;
        let end_row = min(first_row + row_size, extent.q_len);
        let full = first_row + row_size <= extent.q_len;
        let keys = visible_keys(&sight, first_row, end_row - 1i32, full);
        let query = head_operand(query, batch, head, first_row, end_row, head_dim);
        let key = head_operand(key, batch, kv_head, keys.first, keys.end, head_dim);
        let output_gradient =
            head_operand(output_gradient, batch, head, first_row, end_row, value_dim);
        let value = head_operand(value, batch, kv_head, keys.first, keys.end, value_dim);
        let mut visited = first < keys.end && first + column_size > keys.first;
        if visited {
            visited = segments_meet(
                extent,
                lengths_and_ids,
                batch,
                row_tile as u32,
                own_key_tile as u32,
                kind.structure,
            );
        }
        if visited {
            multiply_transposed(
                &query, first_row, &key, first, &mut stage, &mut s, tiles, false, 0usize,
            );
            multiply_transposed(
                &output_gradient,
                first_row,
                &value,
                first,
                &mut stage,
                &mut dp,
                tiles,
                false,
                1usize,
            );
            let whole = is_whole(&keys, first, column_size, kind.structure);
            #[unroll]
            for k in 0..comptime!(tiles.rows_per_unit()) {
                let row = first_row + tile_row(unit_row, k, tiles) as i32;
                let terms = row_terms_of(rows, batch, head, row, extent.q_len);
                #[unroll]
                for c in 0..comptime!(tiles.columns_per_unit()) {
                    let place = Place {
                        batch,
                        head,
                        query: row,
                        key: first + tile_column(unit_column, c, tiles) as i32,
                    };
                    let visible = is_visible(whole, &scoring, &sight, &place, kind.structure);
                    let gradient = score_gradient(
                        s[comptime!(k * tiles.columns_per_unit() + c)],
                        dp[comptime!(k * tiles.columns_per_unit() + c)],
                        terms,
                        visible,
                        &scoring,
                        &place,
                        kind.score,
                        true,
                    );
                    sum[comptime!(k * tiles.columns_per_unit() + c)] += gradient.ds;
                }
            }
        }
        item += grid.splits;
    }

    let first_row = own_row_tile * row_size;
    let first_column = own_key_tile * column_size;
    let row_stride = gradient.stride(2);
    // The parts lie one after the other, each with all sequences of the bias.
    let part = work_tile.split * (grid.planes / grid.heads) + work_tile.batch;
    let target = part as usize * gradient.stride(0) + work_tile.head as usize * gradient.stride(1);
    if comptime!(broadcast.queries) {
        // Down the rows: within a unit, then over the units above each other.
        sync_cube();
        #[unroll]
        for c in 0..comptime!(tiles.columns_per_unit()) {
            let mut column_sum = 0.0f32;
            #[unroll]
            for k in 0..comptime!(tiles.rows_per_unit()) {
                column_sum += sum[comptime!(k * tiles.columns_per_unit() + c)];
            }
            partial[unit_row * comptime!(tiles.columns()) + tile_column(unit_column, c, tiles)] =
                column_sum;
        }
        sync_cube();
        let column = UNIT_POS as usize;
        if column < comptime!(tiles.columns()) && first_column + (column as i32) < extent.kv_len {
            let mut column_sum = 0.0f32;
            for y in 0..comptime!(tiles.row_units()) {
                column_sum += partial[y * comptime!(tiles.columns()) + column];
            }
            gradient[target + first_column as usize + column] = rounded::<G>(column_sum);
        }
    } else {
        #[unroll]
        for k in 0..comptime!(tiles.rows_per_unit()) {
            let row = first_row + tile_row(unit_row, k, tiles) as i32;
            #[unroll]
            for c in 0..comptime!(tiles.columns_per_unit()) {
                let column = first_column + tile_column(unit_column, c, tiles) as i32;
                if row < extent.q_len && column < extent.kv_len {
                    gradient[target + row as usize * row_stride + column as usize] =
                        rounded::<G>(sum[comptime!(k * tiles.columns_per_unit() + c)]);
                }
            }
        }
    }
}
