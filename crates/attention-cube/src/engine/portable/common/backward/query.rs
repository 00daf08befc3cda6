//! The gradient of the query. A cube keeps a tile of queries in shared memory and streams all keys that any of these queries
//! sees.
//!
//! Tensors:
//!
//! - Query and its gradient `[batch, q_heads, q_len, head_dim]`.
//! - Output's gradient `[batch, q_heads, q_len, value_dim]`.
//! - Keys `[batch, kv_heads, kv_len, head_dim]` and values `[batch, kv_heads, kv_len, value_dim]`.
//! - LSE and delta (`rows`) `[batch, q_heads, 5, padded q_len]`, f32.
//!
//! Budget: [`UnitTiles::shared_memory`](crate::tile_ops::tiles::UnitTiles::shared_memory). A unit's registers hold
//! `8 · rows_per_unit` elements of S and dP, and `4 · output_rows · output_vectors` elements of dQ. A unit has
//! `rows_per_unit` rows of S, and `output_rows` rows of dQ with `output_vectors` vectors of 4 columns each. A tile of `rows`
//! queries and a block of `columns` keys take `2 · rows · columns · (2 head_dim + value_dim)` FLOP. Bound: FMA and
//! shared-memory loads, see `tile_ops/product.rs`.

use crate::auxiliary::backward_kind::{BackwardKind, late_scale};
use crate::auxiliary::delta::kernel::{is_blind, row_lse_delta_of};
use crate::math::gradient::{RowLseDelta, score_gradient};
use crate::math::inputs::{BackwardInputs, HeadSizes};
use crate::math::layout::{head_operand, head_rows};
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{Scoring, TileAndBlock, block_mask_shows, is_visible};
use crate::math::score_mod::ScorePlace;
use crate::math::side::Side;
use crate::math::visibility::{
    SeqInfo, blocks_meet, is_whole, seq_info, visible_keys, within_bounds,
};
use crate::tile_ops::product::{
    accumulate, hold, multiply_transposed, new_stage, new_tile, stage_block, store_output,
    store_tile, sync_tiles, zero_output,
};
use crate::tile_ops::score_layout::{tile_column, tile_row, unit_column, unit_row};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn query_gradient<E: Float, C: Float, M: Numeric, F: Float, N: Size>(
    inputs: BackwardInputs<E, N>,
    scoring: Scoring<M, F>,
    gradient: &mut Tensor<Vector<E, N>>,
    grid: Grid,
    sizes: HeadSizes,
    #[comptime] kind: BackwardKind,
    #[define(E, C, M, F)] _elements: [ElemType; 4],
    #[define(N)] _vector: usize,
) {
    let query = &inputs.query;
    let key = &inputs.key;
    let value = &inputs.value;
    let output_gradient = &inputs.output_gradient;
    let rows = &inputs.lse_delta;
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
    let work_tile = work_tile(&grid, index, true);
    let batch = work_tile.batch;
    let head = work_tile.head;
    let kv_head = head / group;
    let seq_info = seq_info(seq_lens, lengths_and_ids, batch, kind.structure);

    let first_row = (work_tile.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), seq_lens.q_len);
    let full = first_row + comptime!(tiles.rows as i32) <= seq_lens.q_len;
    let keys = visible_keys(&seq_info, first_row, end_row - 1i32, full, kind.structure);

    let query = head_operand(query, batch, head, first_row, end_row, head_dim);
    let output_gradient = head_operand(output_gradient, batch, head, first_row, end_row, value_dim);
    let key = head_operand(key, batch, kv_head, keys.first, keys.end, head_dim);
    let value = head_operand(value, batch, kv_head, keys.first, keys.end, value_dim);

    let mut stage = new_stage::<C>(tiles);
    let mut ds_tile = new_tile::<C>(tiles);
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns()));
    // At the end, the kernel multiplies each row of the gradient by the row's factor. The factor of a query that sees
    // no key is 0. For a row with the factor 0, the final store writes 0 even if the row contains NaN. Other units may
    // read the factors after the next sync.
    let mut factors = Shared::<[f32]>::new_slice(tiles.rows);
    let scale = late_scale(&scoring.arguments, tiles);
    #[unroll]
    for step in 0..comptime!(tiles.row_steps()) {
        let row = UNIT_POS as usize + step * tiles.units;
        if row < tiles.rows {
            let lse_delta =
                row_lse_delta_of(rows, batch, head, first_row + row as i32, seq_lens.q_len);
            factors[row] = select(is_blind(lse_delta.reference), 0.0f32, scale);
        }
    }
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dq = zero_output(tiles);
    let unit_row = unit_row(tiles);
    let mut lse_delta = RowsLseDelta {
        reference: Array::new(comptime!(tiles.rows_per_unit())),
        logarithm: Array::new(comptime!(tiles.rows_per_unit())),
        delta: Array::new(comptime!(tiles.rows_per_unit())),
    };
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let row = first_row + tile_row(unit_row, k, tiles) as i32;
        let of_row = row_lse_delta_of(rows, batch, head, row, seq_lens.q_len);
        lse_delta.reference[k] = of_row.reference;
        lse_delta.logarithm[k] = of_row.logarithm;
        lse_delta.delta[k] = of_row.delta;
    }
    // The kernel first multiplies stationary operand 0 (the output's gradient) by V, and then operand 1 (the query) by
    // K. Because K comes last, K is still in shared memory when the kernel multiplies dS by K.
    hold(
        &output_gradient,
        first_row,
        &mut stage,
        false,
        0usize,
        tiles,
    );
    hold(&query, first_row, &mut stage, false, 1usize, tiles);

    let block_size = comptime!(tiles.columns() as i32);
    let blocks = within_bounds(
        keys.first / block_size,
        block_count(keys.end, block_size),
        seq_lens,
        lengths_and_ids,
        batch,
        work_tile.tile,
        Side::Queries,
        kind.structure,
    );
    let mut block = blocks.first;
    while block < blocks.end {
        let visited = blocks_meet(
            seq_lens,
            lengths_and_ids,
            batch,
            work_tile.tile,
            block as u32,
            kind.structure,
        );
        let visited = if comptime!(kind.structure.has_block_mask()) {
            let pair = TileAndBlock {
                batch,
                first_head: head,
                last_head: head,
                first_query: first_row,
                last_query: end_row - 1i32,
                first_key: block * block_size,
                last_key: (block + 1i32) * block_size - 1i32,
            };
            visited && block_mask_shows(&scoring, &pair, kind.structure)
        } else {
            visited
        };
        if visited {
            let first = block * block_size;
            stage_block(&value, &key, first, &mut stage, tiles);
            multiply_transposed(
                &output_gradient,
                first_row,
                &value,
                first,
                &mut stage,
                &mut dp,
                tiles,
                false,
                0usize,
            );
            multiply_transposed(
                &query, first_row, &key, first, &mut stage, &mut s, tiles, false, 1usize,
            );
            let whole = is_whole(
                &keys,
                first,
                seq_lens,
                lengths_and_ids,
                batch,
                work_tile.tile,
                block as u32,
                block_size,
                kind.structure,
            );
            let place = ScorePlace::new(batch, head, first_row, first, seq_info.offset);
            if comptime!(tiles.is_direct()) {
                block_gradients(
                    &mut s, &dp, &lse_delta, &place, whole, &scoring, &seq_info, kind,
                );
            } else if whole {
                // Branch on `whole` (fully visible) once per block, so that a whole block needs no branch per score.
                block_gradients(
                    &mut s, &dp, &lse_delta, &place, true, &scoring, &seq_info, kind,
                );
            } else {
                block_gradients(
                    &mut s, &dp, &lse_delta, &place, false, &scoring, &seq_info, kind,
                );
            }
            store_tile(&s, &mut ds_tile, 1usize, tiles);
            sync_tiles(tiles);
            accumulate(
                &ds_tile,
                &key,
                first,
                &mut stage,
                &mut used,
                &mut dq,
                1usize,
                comptime!(kind.score.leaves_masked(&kind.structure)),
                tiles,
            );
            if comptime!(tiles.is_direct()) {
                // Wait until all units have read this tile in shared memory, since the next block overwrites the tile.
                sync_cube();
            }
        }
        block += 1i32;
    }
    sync_cube();
    let gradient_rows = head_rows(&*gradient, batch, head, first_row, end_row, head_dim);
    store_output(
        &dq,
        &factors,
        &mut stage,
        gradient,
        &gradient_rows,
        first_row,
        false,
        tiles,
    );
}

/// The LSE (reference score and logarithm) and delta of the queries whose scores a unit computes.
#[derive(CubeType)]
struct RowsLseDelta {
    reference: Array<f32>,
    logarithm: Array<f32>,
    delta: Array<f32>,
}

/// Replaces the unit's elements of S by `d loss / d (q·k)`. `first` holds the first query of the tile and the first key
/// of the block. In a `whole` pair of tile and block, every query sees every key.
///
/// With matrix units, the gradients are later rounded to half precision. To avoid underflow in this case, the function
/// omits the factor `scale` (the scale of the scores) from the gradients.
#[cube]
fn block_gradients<M: Numeric, F: Float>(
    s: &mut Array<f32>,
    dp: &Array<f32>,
    lse_delta: &RowsLseDelta,
    first: &ScorePlace,
    whole: bool,
    scoring: &Scoring<M, F>,
    seq_info: &SeqInfo,
    #[comptime] kind: BackwardKind,
) {
    let tiles = comptime!(kind.tiles);
    let unit_row = unit_row(tiles);
    let unit_column = unit_column(tiles);
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        #[unroll]
        for c in 0..comptime!(tiles.columns_per_unit()) {
            let at = comptime!(k * tiles.columns_per_unit() + c);
            let place = ScorePlace::new(
                first.batch,
                first.head,
                first.query + tile_row(unit_row, k, tiles) as i32,
                first.key + tile_column(unit_column, c, tiles) as i32,
                first.offset,
            );
            let visible = is_visible(whole, scoring, seq_info, &place, kind.structure);
            let gradient = score_gradient(
                s[at],
                dp[at],
                RowLseDelta {
                    reference: lse_delta.reference[k],
                    delta: lse_delta.delta[k],
                    logarithm: lse_delta.logarithm[k],
                },
                visible,
                scoring,
                place,
                kind.score,
                comptime!(!tiles.has_fragments()),
            );
            s[at] = gradient.ddot;
        }
    }
}
