//! The gradients of keys and values: for a tile of keys, all queries of the group's heads that see any of them.
//!
//! Budget (unit engine): shared memory as the forward; registers a unit: `8 · rows_per_unit` of Sᵀ and dPᵀ,
//! `8 · output_rows · output_vectors` of dK and dV, which is why the tiles of wide heads are lower here.
//! Work a block: `4 · rows · columns · (head_dim + value_dim)` FLOP; bounds as the forward.

use super::{BackwardKind, row_at, score_gradient};
use crate::kernel::engine::unit::{
    Rows, Vec4, accumulate, mark_used, multiply_transposed, store_output, store_tile, zero_output,
};
use crate::kernel::schedule::{Grid, share};
use crate::kernel::score::{Place, ScoreArguments, is_visible};
use crate::kernel::visibility::{
    Extent, end_key, end_query, first_key, first_query, segments_meet, sight,
};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn key_value_gradient<E: Float, M: Numeric, F: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    rows: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    integers: ComptimeOption<&Tensor<i32>>,
    key_gradient: &mut Tensor<Vector<E, N>>,
    value_gradient: &mut Tensor<Vector<E, N>>,
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
    // The first keys are seen by the most queries: numbered as they lie.
    let share = share(&grid, index, false);
    let batch = share.batch;
    let kv_head = share.head;
    let sight = sight(&extent, &integers, batch, kind.structure);

    let first_row = (share.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), extent.kv_len);
    // Keys past the sequence's length are seen by nobody.
    let exist = min(end_row, sight.length);
    let queries_first = first_query(&sight, first_row);
    let queries_end = select(first_row < exist, end_query(&sight, exist - 1i32), 0i32);
    let rows_whole = first_row + comptime!(tiles.rows as i32) <= exist;

    let key_rows = Rows {
        base: batch as usize * key.stride(0) + kv_head as usize * key.stride(1),
        row_stride: key.stride(2),
        column_stride: key.stride(3),
        first: first_row,
        end: exist,
        columns: head_dim,
        head_rows: 0u32,
        head_stride: 0usize,
    };
    let value_rows = Rows {
        base: batch as usize * value.stride(0) + kv_head as usize * value.stride(1),
        row_stride: value.stride(2),
        column_stride: value.stride(3),
        first: first_row,
        end: exist,
        columns: value_dim,
        head_rows: 0u32,
        head_stride: 0usize,
    };

    let mut stage = Shared::<[Vec4]>::new_slice(comptime!(tiles.stage_vectors()));
    let mut tile = Shared::<[Vec4]>::new_slice(comptime!(tiles.tile_vectors()));
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns()));
    let mut ones = Shared::<[f32]>::new_slice(tiles.rows);
    if UNIT_POS < comptime!(tiles.rows as u32) {
        ones[UNIT_POS as usize] = 1.0f32;
    }
    let mut s = Array::<f32>::new(comptime!(4 * tiles.rows_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(4 * tiles.rows_per_unit()));
    let mut dk = zero_output(tiles);
    let mut dv = zero_output(tiles);
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);

    let block_size = comptime!(tiles.columns() as i32);
    let end_block = (queries_end + block_size - 1i32) / block_size;
    let query_blocks = (extent.q_len as u32).div_ceil(comptime!(tiles.columns() as u32));
    let key_blocks = (extent.kv_len as u32).div_ceil(comptime!(tiles.rows as u32));
    for group_head in 0..group {
        let head = kv_head * group + group_head;
        let query_rows = Rows {
            base: batch as usize * query.stride(0) + head as usize * query.stride(1),
            row_stride: query.stride(2),
            column_stride: query.stride(3),
            first: queries_first,
            end: queries_end,
            columns: head_dim,
            head_rows: 0u32,
            head_stride: 0usize,
        };
        let output_gradient_rows = Rows {
            base: batch as usize * output_gradient.stride(0)
                + head as usize * output_gradient.stride(1),
            row_stride: output_gradient.stride(2),
            column_stride: output_gradient.stride(3),
            first: queries_first,
            end: queries_end,
            columns: value_dim,
            head_rows: 0u32,
            head_stride: 0usize,
        };
        let mut block = queries_first / block_size;
        while block < end_block {
            let mut visited = true;
            if comptime!(kind.structure.segments) {
                let query_block = batch * query_blocks + block as u32;
                let key_block = batch * key_blocks + share.tile;
                visited = segments_meet(&extent, &integers, query_block, key_block);
            }
            if visited {
                let first = block * block_size;
                let last = first + block_size - 1i32;
                multiply_transposed(
                    key,
                    &key_rows,
                    first_row,
                    query,
                    &query_rows,
                    first,
                    &mut stage,
                    &mut s,
                    tiles,
                    false,
                );
                multiply_transposed(
                    value,
                    &value_rows,
                    first_row,
                    output_gradient,
                    &output_gradient_rows,
                    first,
                    &mut stage,
                    &mut dp,
                    tiles,
                    false,
                );
                // Every query of the block sees every key of the tile, from the last query's first key
                // to the first query's last.
                let mut whole = rows_whole
                    && last < extent.q_len
                    && first_row >= first_key(&sight, last)
                    && end_row <= end_key(&sight, first);
                if comptime!(kind.structure.is_irregular()) {
                    whole = false;
                }
                #[unroll]
                for c in 0..4usize {
                    let query_index = first + (unit_column * 4 + c) as i32;
                    let mut logsumexp = 0.0f32;
                    let mut delta = 0.0f32;
                    if query_index < extent.q_len {
                        let at = row_at(
                            batch,
                            head,
                            query_index,
                            group * key.shape(1) as u32,
                            extent.q_len,
                        );
                        logsumexp = rows[at];
                        delta = rows[at + 1];
                    }
                    #[unroll]
                    for k in 0..comptime!(tiles.rows_per_unit()) {
                        let place = Place {
                            batch,
                            head,
                            query: query_index,
                            key: first_row + (unit_row + k * comptime!(tiles.row_units())) as i32,
                        };
                        let mut visible = true;
                        if !whole {
                            visible = is_visible(
                                &mask,
                                &sight,
                                &extent,
                                &integers,
                                &place,
                                kind.structure,
                            );
                        }
                        let gradient = score_gradient(
                            s[k * 4 + c],
                            dp[k * 4 + c],
                            logsumexp,
                            delta,
                            visible,
                            &bias,
                            &place,
                            &score,
                            kind.score,
                        );
                        s[k * 4 + c] = gradient.p;
                        dp[k * 4 + c] = gradient.ddot;
                    }
                }
                store_tile(&s, &mut tile, tiles);
                if comptime!(kind.score.leaves_holes(&kind.structure)) {
                    mark_used(&tile, &mut used, tiles);
                }
                accumulate(
                    &tile,
                    output_gradient,
                    &output_gradient_rows,
                    first,
                    &mut stage,
                    &used,
                    &mut dv,
                    comptime!(kind.score.leaves_holes(&kind.structure)),
                    tiles,
                );
                sync_cube();
                store_tile(&dp, &mut tile, tiles);
                if comptime!(kind.score.leaves_holes(&kind.structure)) {
                    mark_used(&tile, &mut used, tiles);
                }
                accumulate(
                    &tile,
                    query,
                    &query_rows,
                    first,
                    &mut stage,
                    &used,
                    &mut dk,
                    comptime!(kind.score.leaves_holes(&kind.structure)),
                    tiles,
                );
            }
            block += 1i32;
        }
    }
    sync_cube();
    let key_gradient_rows = Rows {
        base: batch as usize * key_gradient.stride(0) + kv_head as usize * key_gradient.stride(1),
        row_stride: key_gradient.stride(2),
        column_stride: 1usize,
        first: first_row,
        end: end_row,
        columns: head_dim,
        head_rows: 0u32,
        head_stride: 0usize,
    };
    store_output(
        &dk,
        &ones,
        key_gradient,
        &key_gradient_rows,
        first_row,
        false,
        tiles,
    );
    let value_gradient_rows = Rows {
        base: batch as usize * value_gradient.stride(0)
            + kv_head as usize * value_gradient.stride(1),
        row_stride: value_gradient.stride(2),
        column_stride: 1usize,
        first: first_row,
        end: end_row,
        columns: value_dim,
        head_rows: 0u32,
        head_stride: 0usize,
    };
    store_output(
        &dv,
        &ones,
        value_gradient,
        &value_gradient_rows,
        first_row,
        false,
        tiles,
    );
}
