//! The bias's gradient: for a tile of the bias, the sum of `ds` over everything it is broadcast along.
//!
//! Budget (unit engine): the stage of the forward and 16 bytes a unit of shared memory; registers a unit:
//! `12 · rows_per_unit`. Work: `2 · rows · columns · (head_dim + value_dim)` FLOP a tile of scores, for
//! every tile of scores. A bias broadcast along queries or keys leaves little to run side by side.

use super::{BackwardKind, row_terms_of, score_gradient};
use crate::kernel::engine::unit::{Vec4, multiply_transposed, tile_column, tile_row};
use crate::kernel::layout::head_rows;
use crate::kernel::rounding::rounded;
use crate::kernel::schedule::{Grid, block_count, share};
use crate::kernel::score::{Place, ScoreArguments, is_visible};
use crate::kernel::visibility::{Extent, is_whole, sight, visible_keys};
use cubecl::prelude::*;

/// The dimensions that the bias is broadcast along, known when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Broadcast {
    pub batch: bool,
    pub heads: bool,
    pub queries: bool,
    pub keys: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn bias_gradient<E: Float, M: Numeric, F: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    rows: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    integers: ComptimeOption<&Tensor<i32>>,
    gradient: &mut Tensor<F>,
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
    #[define(N)] _vector: usize,
) {
    let index = CUBE_POS as u32;
    if index >= grid.cubes {
        terminate!();
    }
    let tiles = comptime!(kind.tiles);
    let row_size = comptime!(tiles.rows as i32);
    let column_size = comptime!(tiles.columns() as i32);
    // The grid counts tiles, heads and sequences of the bias itself, which is 1 wide where it is broadcast.
    let share = share(&grid, index, false);
    let own_row_tile = (share.tile / key_tiles) as i32;
    let own_key_tile = (share.tile % key_tiles) as i32;

    let mut batch_first = share.batch;
    let mut batch_end = share.batch + 1u32;
    if comptime!(broadcast.batch) {
        batch_first = 0u32;
        batch_end = batches;
    }
    let mut head_first = share.head;
    let mut head_end = share.head + 1u32;
    if comptime!(broadcast.heads) {
        head_first = 0u32;
        head_end = q_heads;
    }
    let mut row_tile_first = own_row_tile;
    let mut row_tile_end = own_row_tile + 1i32;
    if comptime!(broadcast.queries) {
        row_tile_first = 0i32;
        row_tile_end = block_count(extent.q_len, row_size);
    }
    let mut key_tile_first = own_key_tile;
    let mut key_tile_end = own_key_tile + 1i32;
    if comptime!(broadcast.keys) {
        key_tile_first = 0i32;
        key_tile_end = block_count(extent.kv_len, column_size);
    }

    let mut stage = Shared::<[Vec4]>::new_slice(comptime!(tiles.stage_vectors()));
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

    for batch in batch_first..batch_end {
        let sight = sight(&extent, &integers, batch, kind.structure);
        for head in head_first..head_end {
            let kv_head = head / group;
            for row_tile in row_tile_first..row_tile_end {
                let first_row = row_tile * row_size;
                let end_row = min(first_row + row_size, extent.q_len);
                let full = first_row + row_size <= extent.q_len;
                let keys = visible_keys(&sight, first_row, end_row - 1i32, full);
                let query_rows = head_rows(query, batch, head, first_row, end_row, head_dim);
                let key_rows = head_rows(key, batch, kv_head, keys.first, keys.end, head_dim);
                let output_gradient_rows =
                    head_rows(output_gradient, batch, head, first_row, end_row, value_dim);
                let value_rows = head_rows(value, batch, kv_head, keys.first, keys.end, value_dim);
                for key_tile in key_tile_first..key_tile_end {
                    let first = key_tile * column_size;
                    if first < keys.end && first + column_size > keys.first {
                        multiply_transposed(
                            query,
                            &query_rows,
                            first_row,
                            key,
                            &key_rows,
                            first,
                            &mut stage,
                            &mut s,
                            tiles,
                            false,
                        );
                        multiply_transposed(
                            output_gradient,
                            &output_gradient_rows,
                            first_row,
                            value,
                            &value_rows,
                            first,
                            &mut stage,
                            &mut dp,
                            tiles,
                            false,
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
                                let visible = is_visible(
                                    whole,
                                    &mask,
                                    &sight,
                                    &extent,
                                    &integers,
                                    &place,
                                    kind.structure,
                                );
                                let gradient = score_gradient(
                                    s[comptime!(k * tiles.columns_per_unit() + c)],
                                    dp[comptime!(k * tiles.columns_per_unit() + c)],
                                    terms.logsumexp,
                                    terms.delta,
                                    visible,
                                    &bias,
                                    &place,
                                    &score,
                                    kind.score,
                                );
                                sum[comptime!(k * tiles.columns_per_unit() + c)] += gradient.ds;
                            }
                        }
                    }
                }
            }
        }
    }

    let first_row = own_row_tile * row_size;
    let first_column = own_key_tile * column_size;
    let row_stride = gradient.stride(2);
    let target =
        share.batch as usize * gradient.stride(0) + share.head as usize * gradient.stride(1);
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
        let mut column_sum = 0.0f32;
        if column < comptime!(tiles.columns()) {
            for y in 0..comptime!(tiles.row_units()) {
                column_sum += partial[y * comptime!(tiles.columns()) + column];
            }
        }
        if comptime!(broadcast.keys) {
            sync_cube();
            if column < comptime!(tiles.columns()) {
                partial[column] = column_sum;
            }
            sync_cube();
            if UNIT_POS == 0u32 {
                let mut all = 0.0f32;
                for x in 0..comptime!(tiles.columns()) {
                    all += partial[x];
                }
                gradient[target] = rounded::<F>(all);
            }
        } else if column < comptime!(tiles.columns())
            && first_column + (column as i32) < extent.kv_len
        {
            gradient[target + first_column as usize + column] = rounded::<F>(column_sum);
        }
    } else if comptime!(broadcast.keys) {
        sync_cube();
        #[unroll]
        for k in 0..comptime!(tiles.rows_per_unit()) {
            let row = tile_row(unit_row, k, tiles);
            let mut row_sum = 0.0f32;
            #[unroll]
            for quad in 0..tiles.column_vectors {
                let at = comptime!(k * tiles.columns_per_unit() + 4 * quad);
                row_sum += (sum[at] + sum[at + 1]) + (sum[at + 2] + sum[at + 3]);
            }
            partial[row * tiles.column_units + unit_column] = row_sum;
        }
        sync_cube();
        let row = UNIT_POS as usize;
        if row < tiles.rows && first_row + (row as i32) < extent.q_len {
            let mut row_sum = 0.0f32;
            for x in 0..tiles.column_units {
                row_sum += partial[row * tiles.column_units + x];
            }
            gradient[target + (first_row as usize + row) * row_stride] = rounded::<F>(row_sum);
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
                        rounded::<F>(sum[comptime!(k * tiles.columns_per_unit() + c)]);
                }
            }
        }
    }
}
