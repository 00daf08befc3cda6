//! The query's gradient: for a tile of queries, all keys that any of them sees.
//!
//! Budget (unit engine): shared memory as the forward; registers a unit: `8 · rows_per_unit` of S and dP,
//! `4 · output_rows · output_vectors` of dQ. Work a block:
//! `2 · rows · columns · (2 head_dim + value_dim)` FLOP; bounds as the forward.

use super::{BackwardKind, row_at, score_gradient};
use crate::kernel::engine::unit::{
    Rows, Vec4, accumulate, mark_used, multiply_transposed, store_output, store_tile, zero_output,
};
use crate::kernel::schedule::{Grid, share};
use crate::kernel::score::{Place, ScoreArguments, is_visible};
use crate::kernel::visibility::{Extent, end_key, first_key, segments_meet, sight};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn query_gradient<E: Float, M: Numeric, F: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    rows: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    integers: ComptimeOption<&Tensor<i32>>,
    gradient: &mut Tensor<Vector<E, N>>,
    grid: Grid,
    extent: Extent,
    score: ScoreArguments,
    group: u32,
    head_dim: u32,
    value_dim: u32,
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
    let share = share(&grid, index, true);
    let batch = share.batch;
    let head = share.head;
    let kv_head = head / group;
    let sight = sight(&extent, &integers, batch, kind.structure);

    let first_row = (share.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), extent.q_len);
    let keys_first = first_key(&sight, first_row);
    let keys_end = end_key(&sight, end_row - 1i32);
    let common_first = first_key(&sight, end_row - 1i32);
    let common_end = end_key(&sight, first_row);
    let rows_whole = first_row + comptime!(tiles.rows as i32) <= extent.q_len;

    let query_rows = Rows {
        base: batch as usize * query.stride(0) + head as usize * query.stride(1),
        row_stride: query.stride(2),
        column_stride: query.stride(3),
        first: first_row,
        end: end_row,
        columns: head_dim,
        head_rows: 0u32,
        head_stride: 0usize,
    };
    let output_gradient_rows = Rows {
        base: batch as usize * output_gradient.stride(0)
            + head as usize * output_gradient.stride(1),
        row_stride: output_gradient.stride(2),
        column_stride: output_gradient.stride(3),
        first: first_row,
        end: end_row,
        columns: value_dim,
        head_rows: 0u32,
        head_stride: 0usize,
    };
    let key_rows = Rows {
        base: batch as usize * key.stride(0) + kv_head as usize * key.stride(1),
        row_stride: key.stride(2),
        column_stride: key.stride(3),
        first: keys_first,
        end: keys_end,
        columns: head_dim,
        head_rows: 0u32,
        head_stride: 0usize,
    };
    let value_rows = Rows {
        base: batch as usize * value.stride(0) + kv_head as usize * value.stride(1),
        row_stride: value.stride(2),
        column_stride: value.stride(3),
        first: keys_first,
        end: keys_end,
        columns: value_dim,
        head_rows: 0u32,
        head_stride: 0usize,
    };

    let mut stage = Shared::<[Vec4]>::new_slice(comptime!(tiles.stage_vectors()));
    let mut ds_tile = Shared::<[Vec4]>::new_slice(comptime!(tiles.tile_vectors()));
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns()));
    let mut ones = Shared::<[f32]>::new_slice(tiles.rows);
    if UNIT_POS < comptime!(tiles.rows as u32) {
        ones[UNIT_POS as usize] = 1.0f32;
    }
    let mut s = Array::<f32>::new(comptime!(4 * tiles.rows_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(4 * tiles.rows_per_unit()));
    let mut dq = zero_output(tiles);
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);
    let mut logsumexp = Array::<f32>::new(comptime!(tiles.rows_per_unit()));
    let mut delta = Array::<f32>::new(comptime!(tiles.rows_per_unit()));
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let row = first_row + (unit_row + k * comptime!(tiles.row_units())) as i32;
        logsumexp[k] = 0.0f32;
        delta[k] = 0.0f32;
        if row < end_row {
            let at = row_at(batch, head, row, group * key.shape(1) as u32, extent.q_len);
            logsumexp[k] = rows[at];
            delta[k] = rows[at + 1];
        }
    }

    let block_size = comptime!(tiles.columns() as i32);
    let mut block = keys_first / block_size;
    let end_block = (keys_end + block_size - 1i32) / block_size;
    let query_blocks = (extent.q_len as u32).div_ceil(comptime!(tiles.rows as u32));
    let key_blocks = (extent.kv_len as u32).div_ceil(comptime!(tiles.columns() as u32));
    while block < end_block {
        let mut visited = true;
        if comptime!(kind.structure.segments) {
            let query_block = batch * query_blocks + share.tile;
            let key_block = batch * key_blocks + block as u32;
            visited = segments_meet(&extent, &integers, query_block, key_block);
        }
        if visited {
            let first = block * block_size;
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
            let mut whole = rows_whole && first >= common_first && first + block_size <= common_end;
            if comptime!(kind.structure.is_irregular()) {
                whole = false;
            }
            #[unroll]
            for k in 0..comptime!(tiles.rows_per_unit()) {
                #[unroll]
                for c in 0..4usize {
                    let place = Place {
                        batch,
                        head,
                        query: first_row + (unit_row + k * comptime!(tiles.row_units())) as i32,
                        key: first + (unit_column * 4 + c) as i32,
                    };
                    let mut visible = true;
                    if !whole {
                        visible =
                            is_visible(&mask, &sight, &extent, &integers, &place, kind.structure);
                    }
                    let gradient = score_gradient(
                        s[k * 4 + c],
                        dp[k * 4 + c],
                        logsumexp[k],
                        delta[k],
                        visible,
                        &bias,
                        &place,
                        &score,
                        kind.score,
                    );
                    s[k * 4 + c] = gradient.ddot;
                }
            }
            store_tile(&s, &mut ds_tile, tiles);
            if comptime!(kind.score.leaves_holes(&kind.structure)) {
                mark_used(&ds_tile, &mut used, tiles);
            }
            accumulate(
                &ds_tile,
                key,
                &key_rows,
                first,
                &mut stage,
                &used,
                &mut dq,
                comptime!(kind.score.leaves_holes(&kind.structure)),
                tiles,
            );
        }
        block += 1i32;
    }
    sync_cube();
    let gradient_rows = Rows {
        base: batch as usize * gradient.stride(0) + head as usize * gradient.stride(1),
        row_stride: gradient.stride(2),
        column_stride: 1usize,
        first: first_row,
        end: end_row,
        columns: head_dim,
        head_rows: 0u32,
        head_stride: 0usize,
    };
    store_output(
        &dq,
        &ones,
        gradient,
        &gradient_rows,
        first_row,
        false,
        tiles,
    );
}
