//! Computes the gradient of a table on scalar units, for any score mod.
//!
//! Algorithm: each cube recomputes a part of the score tiles, with their gradients dS. A score depends on one element
//! of the table, so its share of the gradient is `dS · d score / d element`. The units of a cube exchange these shares
//! through shared memory, and add them (see `add_shares`). `sum_parts` adds the sums of the cubes. A launch covers a
//! range of the score tiles, because software drivers limit the loops of a launch.
//!
//! Tensors: the operands of a backward, and `partial [parts · elements]` in f32, which must hold zeros.
//!
//! Budget: the shared memory of the forward's operand tiles plus `8 · columns_per_unit` bytes per unit, and `12 ·
//! rows_per_unit` registers per unit. Bound: reads of shared memory, because each unit reads all shares of a tile,
//! which are `rows · columns`.

use super::add_shares;
use crate::auxiliary::backward_kind::BackwardKind;
use crate::auxiliary::delta::kernel::row_lse_delta_of;
use crate::math::gradient::score_gradient;
use crate::math::inputs::{BackwardInputs, HeadSizes};
use crate::math::layout::head_operand;
use crate::math::score::{Scoring, TileAndBlock, block_mask_shows, capped, is_visible};
use crate::math::score_mod::ScorePlace;
use crate::math::score_mod::kernel::table_slope;
use crate::math::visibility::{blocks_meet, is_whole, seq_info, visible_keys};
use crate::tile_ops::product::{multiply_transposed, new_stage};
use crate::tile_ops::score_layout::{tile_column, tile_row, unit_column, unit_row};
use cubecl::prelude::*;

/// The sizes of the launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct TableCounts {
    /// The number of partial sums, which is the number of cubes with work.
    pub parts: u32,
    /// The number of elements of the table.
    pub elements: u32,
    pub q_heads: u32,
    pub query_tiles: u32,
    pub key_tiles: u32,
    /// The range of score tiles that the launch covers, counted over all sequences and heads.
    pub first_tile: u32,
    pub end_tile: u32,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn table_gradient<E: Float, M: Numeric, F: Float, N: Size>(
    inputs: BackwardInputs<E, N>,
    scoring: Scoring<M, F>,
    partial: &mut Tensor<f32>,
    counts: TableCounts,
    sizes: HeadSizes,
    #[comptime] kind: BackwardKind,
    #[define(E, M, F)] _elements: [ElemType; 3],
    #[define(N)] _vector: usize,
) {
    let query = &inputs.query;
    let key = &inputs.key;
    let value = &inputs.value;
    let output_gradient = &inputs.output_gradient;
    let rows = &inputs.lse_delta;
    let head_dim = sizes.head_dim;
    let value_dim = sizes.value_dim;
    let part = CUBE_POS as u32;
    if part >= counts.parts {
        terminate!();
    }
    let seq_lens = &scoring.seq_lens;
    let lengths_and_ids = &scoring.lengths_and_ids;
    let tiles = comptime!(kind.tiles);
    let row_size = comptime!(tiles.rows as i32);
    let column_size = comptime!(tiles.columns() as i32);
    let columns_per_unit = comptime!(tiles.columns_per_unit());
    let shares = comptime!(tiles.units * tiles.columns_per_unit());

    let mut stage = new_stage::<f32>(tiles);
    let mut amounts = Shared::<[f32]>::new_slice(shares);
    let mut places = Shared::<[u32]>::new_slice(shares);
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let unit_row = unit_row(tiles);
    let unit_column = unit_column(tiles);
    let own_part = part as usize * counts.elements as usize;

    let mut item = counts.first_tile + part;
    while item < counts.end_tile {
        let key_tile = item % counts.key_tiles;
        let row_tile = item / counts.key_tiles % counts.query_tiles;
        let plane = item / counts.key_tiles / counts.query_tiles;
        let head = plane % counts.q_heads;
        let batch = plane / counts.q_heads;
        let kv_head = head / sizes.group;
        let seq_info = seq_info(seq_lens, lengths_and_ids, batch, kind.structure);
        let first = key_tile as i32 * column_size;
        let first_row = row_tile as i32 * row_size;
        let end_row = min(first_row + row_size, seq_lens.q_len);
        let full = first_row + row_size <= seq_lens.q_len;
        let keys = visible_keys(&seq_info, first_row, end_row - 1i32, full, kind.structure);
        let query = head_operand(query, batch, head, first_row, end_row, head_dim);
        let key = head_operand(key, batch, kv_head, keys.first, keys.end, head_dim);
        let output_gradient =
            head_operand(output_gradient, batch, head, first_row, end_row, value_dim);
        let value = head_operand(value, batch, kv_head, keys.first, keys.end, value_dim);
        let mut visited = first < keys.end && first + column_size > keys.first;
        if visited {
            visited = blocks_meet(
                seq_lens,
                lengths_and_ids,
                batch,
                row_tile,
                key_tile,
                kind.structure,
            );
        }
        let visited = if comptime!(kind.structure.has_block_mask()) {
            let pair = TileAndBlock {
                batch,
                first_head: head,
                last_head: head,
                first_query: first_row,
                last_query: end_row - 1i32,
                first_key: first,
                last_key: first + column_size - 1i32,
            };
            visited && block_mask_shows(&scoring, &pair, kind.structure)
        } else {
            visited
        };
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
            let whole = is_whole(
                &keys,
                first,
                seq_lens,
                lengths_and_ids,
                batch,
                row_tile,
                key_tile,
                column_size,
                kind.structure,
            );
            #[unroll]
            for k in 0..comptime!(tiles.rows_per_unit()) {
                let row = first_row + tile_row(unit_row, k, tiles) as i32;
                let lse_delta = row_lse_delta_of(rows, batch, head, row, seq_lens.q_len);
                #[unroll]
                for c in 0..columns_per_unit {
                    let place = ScorePlace::new(
                        batch,
                        head,
                        row,
                        first + tile_column(unit_column, c, tiles) as i32,
                        seq_info.offset,
                    );
                    let dot = s[comptime!(k * columns_per_unit + c)];
                    let gradient = score_gradient(
                        dot,
                        dp[comptime!(k * columns_per_unit + c)],
                        lse_delta,
                        is_visible(whole, &scoring, &seq_info, &place, kind.structure),
                        &scoring,
                        place,
                        kind.score,
                        true,
                    );
                    let mut amount = 0.0f32;
                    let mut element = 0u32;
                    // The derivative of a hidden score may be NaN, and the gradient of a hidden score is 0.
                    if gradient.ds != 0.0f32 {
                        let score = capped(dot, &scoring.arguments, kind.score);
                        let slope =
                            table_slope(score, place, &scoring.tables, kind.score.score_mod);
                        amount = gradient.ds * slope.derivative;
                        element = min(slope.element, counts.elements - 1u32);
                    }
                    amounts[UNIT_POS as usize * columns_per_unit + c] = amount;
                    places[UNIT_POS as usize * columns_per_unit + c] = element;
                }
                add_shares(&amounts, &places, partial, own_part, shares, tiles.units);
            }
        }
        item += counts.parts;
    }
}
