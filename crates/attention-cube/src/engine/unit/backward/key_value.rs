//! The gradients of keys and values: for a tile of keys, all queries of the group's heads that see any of them.
//!
//! Budget (unit engine): shared memory as the forward; registers a unit: `8 · rows_per_unit` of Sᵀ and dPᵀ,
//! `8 · output_rows · output_vectors` of dK and dV, which is why the tiles of wide heads are lower here.
//! Work a block: `4 · rows · columns · (head_dim + value_dim)` FLOP; bounds as the forward.

use crate::math::gradient::score_gradient;
use crate::math::layout::{Rows, head_rows};
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{Place, ScoreArguments, is_visible};
use crate::math::side::Side;
use crate::math::visibility::{
    Extent, Sight, is_whole, segments_meet, sight, visible_queries, within_segments,
};
use crate::passes::backward::BackwardKind;
use crate::passes::delta::kernel::row_terms_of;
use crate::tile::product::{
    Vec4, accumulate, multiply_transposed, store_output, store_tile, tile_column, tile_row,
    unit_factors, zero_output,
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
    let work_tile = work_tile(&grid, index, false);
    let batch = work_tile.batch;
    let kv_head = work_tile.head;
    let sight = sight(&extent, &lengths_and_ids, batch, kind.structure);

    let first_row = (work_tile.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), extent.kv_len);
    // Keys past the sequence's length are seen by nobody.
    let exist = min(end_row, sight.length);
    let full = first_row + comptime!(tiles.rows as i32) <= exist;
    let queries = visible_queries(&sight, first_row, exist - 1i32, full);

    let key_rows = head_rows(key, batch, kv_head, first_row, exist, head_dim);
    let value_rows = head_rows(value, batch, kv_head, first_row, exist, value_dim);

    let mut stage = Shared::<[Vec4]>::new_slice(comptime!(tiles.stage_vectors()));
    let mut tile = Shared::<[Vec4]>::new_slice(comptime!(tiles.tile_vectors()));
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns()));
    let ones = unit_factors(tiles);
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dk = zero_output(tiles);
    let mut dv = zero_output(tiles);

    let block_size = comptime!(tiles.columns() as i32);
    let blocks = within_segments(
        queries.first / block_size,
        block_count(queries.end, block_size),
        &extent,
        &lengths_and_ids,
        batch,
        work_tile.tile,
        Side::Keys,
        kind.structure,
    );
    for group_head in 0..group {
        let head = kv_head * group + group_head;
        let query_rows = head_rows(query, batch, head, queries.first, queries.end, head_dim);
        let output_gradient_rows = head_rows(
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
                &extent,
                &lengths_and_ids,
                batch,
                block as u32,
                work_tile.tile,
                kind.structure,
            );
            if visited {
                let first = block * block_size;
                block_scores(
                    query,
                    &query_rows,
                    key,
                    &key_rows,
                    value,
                    &value_rows,
                    output_gradient,
                    &output_gradient_rows,
                    rows,
                    &mask,
                    &bias,
                    &lengths_and_ids,
                    &sight,
                    &extent,
                    &score,
                    batch,
                    head,
                    first_row,
                    first,
                    is_whole(&queries, first, block_size, kind.structure),
                    &mut stage,
                    &mut s,
                    &mut dp,
                    kind,
                );
                store_tile(&s, &mut tile, tiles);
                accumulate(
                    &tile,
                    output_gradient,
                    &output_gradient_rows,
                    first,
                    &mut stage,
                    &mut used,
                    &mut dv,
                    comptime!(kind.score.leaves_masked(&kind.structure)),
                    tiles,
                );
                sync_cube();
                store_tile(&dp, &mut tile, tiles);
                accumulate(
                    &tile,
                    query,
                    &query_rows,
                    first,
                    &mut stage,
                    &mut used,
                    &mut dk,
                    comptime!(kind.score.leaves_masked(&kind.structure)),
                    tiles,
                );
                if comptime!(tiles.direct) {
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
        &ones,
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
        &ones,
        value_gradient,
        &value_gradient_rows,
        first_row,
        false,
        tiles,
    );
}

/// P and `d loss / d (q·k)` of a tile's keys and the queries of the block at `first`, in the places of S
/// and dP.
#[cube]
pub(super) fn block_scores<E: Float, M: Numeric, F: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    query_rows: &Rows,
    key: &Tensor<Vector<E, N>>,
    key_rows: &Rows,
    value: &Tensor<Vector<E, N>>,
    value_rows: &Rows,
    output_gradient: &Tensor<Vector<E, N>>,
    output_gradient_rows: &Rows,
    rows: &Tensor<f32>,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<F>>,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    sight: &Sight,
    extent: &Extent,
    score: &ScoreArguments,
    batch: u32,
    head: u32,
    first_row: i32,
    first: i32,
    whole: bool,
    stage: &mut Shared<[Vec4]>,
    s: &mut Array<f32>,
    dp: &mut Array<f32>,
    #[comptime] kind: BackwardKind,
) {
    let tiles = comptime!(kind.tiles);
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);
    multiply_transposed(
        key, key_rows, first_row, query, query_rows, first, stage, s, tiles, false,
    );
    multiply_transposed(
        value,
        value_rows,
        first_row,
        output_gradient,
        output_gradient_rows,
        first,
        stage,
        dp,
        tiles,
        false,
    );
    #[unroll]
    for c in 0..comptime!(tiles.columns_per_unit()) {
        let query_index = first + tile_column(unit_column, c, tiles) as i32;
        let terms = row_terms_of(rows, batch, head, query_index, extent.q_len);
        #[unroll]
        for k in 0..comptime!(tiles.rows_per_unit()) {
            let place = Place {
                batch,
                head,
                query: query_index,
                key: first_row + tile_row(unit_row, k, tiles) as i32,
            };
            let visible = is_visible(
                whole,
                mask,
                sight,
                extent,
                lengths_and_ids,
                &place,
                kind.structure,
            );
            let gradient = score_gradient(
                s[comptime!(k * tiles.columns_per_unit() + c)],
                dp[comptime!(k * tiles.columns_per_unit() + c)],
                terms,
                visible,
                bias,
                &place,
                score,
                kind.score,
            );
            s[comptime!(k * tiles.columns_per_unit() + c)] = gradient.p;
            dp[comptime!(k * tiles.columns_per_unit() + c)] = gradient.ddot;
        }
    }
}
