//! The gradients of keys and values: for a tile of keys, all queries of the group's heads that see any of them.
//!
//! Budget: shared memory as the forward; registers a unit: `8 · rows_per_unit` of Sᵀ and dPᵀ,
//! `8 · output_rows · output_vectors` of dK and dV, which is why the tiles of wide heads are lower here.
//! Work a block: `4 · rows · columns · (head_dim + value_dim)` FLOP; bounds as the forward.

use crate::math::gradient::{RowTerms, score_gradient};
use crate::math::layout::{Operand, head_operand, head_rows};
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{Place, ScoreArguments, Scoring, is_visible, scoring};
use crate::math::side::Side;
use crate::math::visibility::{
    Extent, Sight, is_whole, segments_meet, sight, visible_queries, within_segments,
};
use crate::passes::backward::{BackwardKind, late_scale};
use crate::passes::delta::kernel::row_terms_of;
use crate::tile::product::{
    Stage, Vec4, accumulate, hold, multiply_transposed, new_stage, new_tile, row_factors,
    stage_block, store_output, store_tile, sync_tiles, zero_output,
};
use crate::tile::score_places::{tile_column, tile_row, unit_column, unit_row};
use crate::tile::tiles::UnitTiles;
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn key_value_gradient<E: Float, C: Float, M: Numeric, F: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    output_gradient: &Tensor<Vector<E, N>>,
    rows: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
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
    // The first keys are seen by the most queries: numbered as they lie.
    let work_tile = work_tile(&grid, index, false);
    let batch = work_tile.batch;
    let kv_head = work_tile.head;
    let sight = sight(extent, lengths_and_ids, batch, kind.structure);

    let first_row = (work_tile.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), extent.kv_len);
    // Keys past the sequence's length are seen by nobody.
    let exist = min(end_row, sight.length);
    let full = first_row + comptime!(tiles.rows as i32) <= exist;
    let queries = visible_queries(&sight, first_row, exist - 1i32, full);

    let key = head_operand(key, batch, kv_head, first_row, exist, head_dim);
    let value = head_operand(value, batch, kv_head, first_row, exist, value_dim);

    let mut stage = new_stage::<C>(tiles);
    let mut tile = new_tile::<C>(tiles);
    let mut terms = Shared::<[Vec4]>::new_slice(comptime!(tiles.term_vectors()));
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns()));
    let shares = row_factors(f32::new(comptime!(1.0 / tiles.p_scale())), tiles);
    let scales = row_factors(late_scale(&score, tiles), tiles);
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dk = zero_output(tiles);
    let mut dv = zero_output(tiles);
    hold(&key, first_row, &mut stage, false, 0usize, tiles);
    hold(&value, first_row, &mut stage, false, 1usize, tiles);

    let block_size = comptime!(tiles.columns() as i32);
    let blocks = within_segments(
        queries.first / block_size,
        block_count(queries.end, block_size),
        extent,
        lengths_and_ids,
        batch,
        work_tile.tile,
        Side::Keys,
        kind.structure,
    );
    for group_head in 0..group {
        let head = kv_head * group + group_head;
        let query = head_operand(query, batch, head, queries.first, queries.end, head_dim);
        let output_gradient = head_operand(
            output_gradient,
            batch,
            head,
            queries.first,
            queries.end,
            value_dim,
        );
        let mut block = blocks.first;
        while block < blocks.end {
            let visited = segments_meet(
                extent,
                lengths_and_ids,
                batch,
                block as u32,
                work_tile.tile,
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
                store_tile(&s, &mut tile, 1usize, tiles);
                if comptime!(tiles.is_resident()) {
                    store_tile(&dp, &mut tile, 0usize, tiles);
                }
                sync_tiles(tiles);
                accumulate(
                    &tile,
                    &output_gradient,
                    first,
                    &mut stage,
                    &mut used,
                    &mut dv,
                    1usize,
                    comptime!(kind.score.leaves_masked(&kind.structure)),
                    tiles,
                );
                if comptime!(!tiles.is_resident()) {
                    sync_cube();
                    store_tile(&dp, &mut tile, 0usize, tiles);
                }
                accumulate(
                    &tile,
                    &query,
                    first,
                    &mut stage,
                    &mut used,
                    &mut dk,
                    0usize,
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
    }
    sync_cube();
    let key_gradient_rows = head_rows(&*key_gradient, batch, kv_head, first_row, end_row, head_dim);
    store_output(
        &dk,
        &scales,
        &mut stage,
        key_gradient,
        &key_gradient_rows,
        first_row,
        false,
        tiles,
    );
    let value_gradient_rows = head_rows(
        &*value_gradient,
        batch,
        kv_head,
        first_row,
        end_row,
        value_dim,
    );
    store_output(
        &dv,
        &shares,
        &mut stage,
        value_gradient,
        &value_gradient_rows,
        first_row,
        false,
        tiles,
    );
}

/// A tile of keys and a block of queries.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Pair {
    pub batch: u32,
    /// The queries'.
    pub head: u32,
    pub first_key: i32,
    pub first_query: i32,
    /// Whether all of the queries see all of the keys.
    pub whole: bool,
}

/// P and `d loss / d (q·k)` of a pair, in the places of S and dP: as they are rounded, where planes multiply fragments.
#[cube]
pub(super) fn block_scores<E: Float, C: Float, M: Numeric, F: Float, N: Size>(
    query: &Operand<'_, E, N>,
    key: &Operand<'_, E, N>,
    value: &Operand<'_, E, N>,
    output_gradient: &Operand<'_, E, N>,
    rows: &Tensor<f32>,
    scoring: &Scoring<'_, '_, '_, M, F>,
    sight: &Sight,
    pair: &Pair,
    terms: &mut Shared<[Vec4]>,
    stage: &mut Stage<C>,
    s: &mut Array<f32>,
    dp: &mut Array<f32>,
    #[comptime] kind: BackwardKind,
) {
    let tiles = comptime!(kind.tiles);
    let first_key = pair.first_key;
    let first_query = pair.first_query;
    if comptime!(tiles.has_fragments()) {
        share_terms(rows, pair, scoring.extent.q_len, terms, tiles);
    }
    stage_block(query, output_gradient, first_query, stage, tiles);
    multiply_transposed(
        key,
        first_key,
        query,
        first_query,
        stage,
        s,
        tiles,
        false,
        0usize,
    );
    multiply_transposed(
        value,
        first_key,
        output_gradient,
        first_query,
        stage,
        dp,
        tiles,
        false,
        1usize,
    );
    if comptime!(tiles.is_direct()) {
        block_gradients(rows, &*terms, s, dp, pair, pair.whole, scoring, sight, kind);
    } else if pair.whole {
        // Without a branch a score.
        block_gradients(rows, &*terms, s, dp, pair, true, scoring, sight, kind);
    } else {
        block_gradients(rows, &*terms, s, dp, pair, false, scoring, sight, kind);
    }
}

/// Copies what is known beforehand of a block's queries to shared memory, where many units need it: all references, then all Δ, then all
/// logarithms. Nobody reads those of the last block any more; the copies of the operands make them visible.
#[cube]
fn share_terms(
    rows: &Tensor<f32>,
    pair: &Pair,
    q_len: i32,
    terms: &mut Shared<[Vec4]>,
    #[comptime] tiles: UnitTiles,
) {
    let of_term = comptime!(tiles.columns() / 4);
    let total = comptime!(tiles.term_vectors());
    let first = pair.batch as usize * rows.stride(0) + pair.head as usize * rows.stride(1);
    #[unroll]
    for step in 0..comptime!(total.div_ceil(tiles.units)) {
        let index = UNIT_POS as usize + comptime!(step * tiles.units);
        if index < total {
            let at = first + index / of_term * rows.stride(2);
            let query = pair.first_query + (index % of_term * 4) as i32;
            let mut values = Vec4::new(0.0);
            #[unroll]
            for lane in 0..4usize {
                let query = query + lane as i32;
                let value = rows[at + select(query < q_len, query, 0i32) as usize];
                values.insert(lane, select(query < q_len, value, 0.0f32));
            }
            terms[index] = values;
        }
    }
}

/// [`block_scores`] of S and dP; where the pair is `whole`, every query sees every key.
#[cube]
fn block_gradients<M: Numeric, F: Float>(
    rows: &Tensor<f32>,
    terms: &Shared<[Vec4]>,
    s: &mut Array<f32>,
    dp: &mut Array<f32>,
    pair: &Pair,
    whole: bool,
    scoring: &Scoring<'_, '_, '_, M, F>,
    sight: &Sight,
    #[comptime] kind: BackwardKind,
) {
    let tiles = comptime!(kind.tiles);
    let unit_row = unit_row(tiles);
    let unit_column = unit_column(tiles);
    let of_term = comptime!(tiles.columns() / 4);
    #[unroll]
    for c in 0..comptime!(tiles.columns_per_unit()) {
        let column = tile_column(unit_column, c, tiles);
        let query_index = pair.first_query + column as i32;
        let of_query = if comptime!(tiles.has_fragments()) {
            RowTerms {
                reference: terms[column / 4].extract(comptime!(c % 4)),
                delta: terms[of_term + column / 4].extract(comptime!(c % 4)),
                logarithm: terms[comptime!(2 * of_term) + column / 4].extract(comptime!(c % 4)),
            }
        } else {
            row_terms_of(
                rows,
                pair.batch,
                pair.head,
                query_index,
                scoring.extent.q_len,
            )
        };
        #[unroll]
        for k in 0..comptime!(tiles.rows_per_unit()) {
            let at = comptime!(k * tiles.columns_per_unit() + c);
            let place = Place {
                batch: pair.batch,
                head: pair.head,
                query: query_index,
                key: pair.first_key + tile_row(unit_row, k, tiles) as i32,
            };
            let visible = is_visible(whole, scoring, sight, &place, kind.structure);
            let gradient = score_gradient(
                s[at],
                dp[at],
                of_query,
                visible,
                scoring,
                &place,
                kind.score,
                comptime!(!tiles.has_fragments()),
            );
            let mut p = gradient.p;
            if comptime!(tiles.has_fragments()) {
                p *= f32::new(comptime!(tiles.p_scale()));
            }
            s[at] = p;
            dp[at] = gradient.ddot;
        }
    }
}
