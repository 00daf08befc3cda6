//! The query's gradient: for a tile of queries, all keys that any of them sees.
//!
//! Budget: shared memory as the forward; registers a unit: `8 · rows_per_unit` of S and dP,
//! `4 · output_rows · output_vectors` of dQ. Work a block:
//! `2 · rows · columns · (2 head_dim + value_dim)` FLOP; bounds as the forward.

use crate::math::gradient::RowTerms;
use crate::math::gradient::score_gradient;
use crate::math::layout::{head_operand, head_rows};
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{Place, ScoreArguments, Scoring, is_visible, scoring};
use crate::math::side::Side;
use crate::math::visibility::{
    Extent, Sight, is_whole, segments_meet, sight, visible_keys, within_segments,
};
use crate::passes::backward::{BackwardKind, late_scale};
use crate::passes::delta::kernel::is_blind;
use crate::passes::delta::kernel::row_terms_of;
use crate::tile::product::{
    accumulate, hold, multiply_transposed, new_stage, new_tile, stage_block, store_output,
    store_tile, sync_tiles, zero_output,
};
use crate::tile::score_places::{tile_column, tile_row, unit_column, unit_row};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn query_gradient<E: Float, C: Float, M: Numeric, F: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    rows: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    gradient: &mut Tensor<Vector<E, N>>,
    grid: Grid,
    extent: Extent,
    score: ScoreArguments,
    group: u32,
    head_dim: u32,
    value_dim: u32,
    #[comptime] kind: BackwardKind,
    #[define(E)] _element: ElemType,
    #[define(C)] _product_element: ElemType,
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
    let work_tile = work_tile(&grid, index, true);
    let batch = work_tile.batch;
    let head = work_tile.head;
    let kv_head = head / group;
    let sight = sight(extent, lengths_and_ids, batch, kind.structure);

    let first_row = (work_tile.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), extent.q_len);
    let full = first_row + comptime!(tiles.rows as i32) <= extent.q_len;
    let keys = visible_keys(&sight, first_row, end_row - 1i32, full);

    let query = head_operand(query, batch, head, first_row, end_row, head_dim);
    let output_gradient = head_operand(output_gradient, batch, head, first_row, end_row, value_dim);
    let key = head_operand(key, batch, kv_head, keys.first, keys.end, head_dim);
    let value = head_operand(value, batch, kv_head, keys.first, keys.end, value_dim);

    let mut stage = new_stage::<C>(tiles);
    let mut ds_tile = new_tile::<C>(tiles);
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns()));
    // Of a query that sees nothing the gradient is 0, whatever others of its tile have seen. A sync makes them visible.
    let mut factors = Shared::<[f32]>::new_slice(tiles.rows);
    let scale = late_scale(&score, tiles);
    #[unroll]
    for step in 0..comptime!(tiles.row_steps()) {
        let row = UNIT_POS as usize + step * tiles.units;
        if row < tiles.rows {
            let terms = row_terms_of(rows, batch, head, first_row + row as i32, extent.q_len);
            factors[row] = select(is_blind(terms.reference), 0.0f32, scale);
        }
    }
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dq = zero_output(tiles);
    let unit_row = unit_row(tiles);
    let mut terms = RowsTerms {
        reference: Array::new(comptime!(tiles.rows_per_unit())),
        logarithm: Array::new(comptime!(tiles.rows_per_unit())),
        delta: Array::new(comptime!(tiles.rows_per_unit())),
    };
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let row = first_row + tile_row(unit_row, k, tiles) as i32;
        let of_row = row_terms_of(rows, batch, head, row, extent.q_len);
        terms.reference[k] = of_row.reference;
        terms.logarithm[k] = of_row.logarithm;
        terms.delta[k] = of_row.delta;
    }
    // The keys last: the gradient's product needs them once more.
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
    let blocks = within_segments(
        keys.first / block_size,
        block_count(keys.end, block_size),
        extent,
        lengths_and_ids,
        batch,
        work_tile.tile,
        Side::Queries,
        kind.structure,
    );
    let mut block = blocks.first;
    while block < blocks.end {
        let visited = segments_meet(
            extent,
            lengths_and_ids,
            batch,
            work_tile.tile,
            block as u32,
            kind.structure,
        );
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
            let whole = is_whole(&keys, first, block_size, kind.structure);
            let place = Place {
                batch,
                head,
                query: first_row,
                key: first,
            };
            if comptime!(tiles.is_direct()) {
                block_gradients(&mut s, &dp, &terms, &place, whole, &scoring, &sight, kind);
            } else if whole {
                // Without a branch a score.
                block_gradients(&mut s, &dp, &terms, &place, true, &scoring, &sight, kind);
            } else {
                block_gradients(&mut s, &dp, &terms, &place, false, &scoring, &sight, kind);
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
                // Before the next block's tile takes this one's place.
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

/// What is known beforehand of a unit's rows.
#[derive(CubeType)]
struct RowsTerms {
    reference: Array<f32>,
    logarithm: Array<f32>,
    delta: Array<f32>,
}

/// `d loss / d (q·k)` in the place of the unit's part of S, as it is rounded where planes multiply fragments. `first` is the first place of the
/// tile and the block; where these are `whole`, every query sees every key.
#[cube]
fn block_gradients<M: Numeric, F: Float>(
    s: &mut Array<f32>,
    dp: &Array<f32>,
    terms: &RowsTerms,
    first: &Place,
    whole: bool,
    scoring: &Scoring<'_, '_, '_, M, F>,
    sight: &Sight,
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
            let place = Place {
                batch: first.batch,
                head: first.head,
                query: first.query + tile_row(unit_row, k, tiles) as i32,
                key: first.key + tile_column(unit_column, c, tiles) as i32,
            };
            let visible = is_visible(whole, scoring, sight, &place, kind.structure);
            let gradient = score_gradient(
                s[at],
                dp[at],
                RowTerms {
                    reference: terms.reference[k],
                    delta: terms.delta[k],
                    logarithm: terms.logarithm[k],
                },
                visible,
                scoring,
                &place,
                kind.score,
                comptime!(!tiles.has_fragments()),
            );
            s[at] = gradient.ddot;
        }
    }
}
