//! The forward: for a tile of queries, all keys that any of them sees, block by block, with the online softmax.
//!
//! Budget: [`UnitTiles::shared_memory`]; registers a unit: `4 · rows_per_unit` of S,
//! `4 · output_rows · output_vectors` of O, the operands of one step. Work a block of keys:
//! `2 · rows · columns · (head_dim + value_dim)` FLOP; FMA and shared-memory loads bound it, see
//! `tile/product.rs`. Memory: the output and one f32 a query.
//!
//! The same kernel decodes: `packed` puts the query heads of a group into one tile's rows, so that a key
//! is read once for all of them, and `split` gives each cube a part of the keys and writes a normalised
//! partial output with its logsumexp, in two numbers, which `passes/combine/kernel.rs` joins.
//!
//! Keys and values may be words of int8 with a scale a row. The products are of codes: a key's scale is multiplied into its scores, a
//! value's into its probabilities once these are summed up.

use crate::math::layout::{Rows, group_rows, head_operand, operand};
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{
    Place, ScoreArguments, ScoreKind, Scoring, biased, capped, is_visible, saved_logarithm, scoring,
};
use crate::math::side::Side;
use crate::math::visibility::{
    Extent, Sight, Structure, is_whole, segments_meet, sight, visible_keys, within_segments,
};
use crate::tile::product::{
    accumulate, hold, multiply_transposed, new_stage, new_tile, rescale, stage_block, store_output,
    store_tile, zero_output,
};
use crate::tile::score_places::{tile_column, tile_row, unit_column, unit_row};
use crate::tile::tiles::UnitTiles;
use crate::tiled::softmax::{advance, row_statistics, tell_moved, total};
use cubecl::prelude::*;

/// What the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ForwardKind {
    pub tiles: UnitTiles,
    pub structure: Structure,
    pub score: ScoreKind,
    /// A tile's rows are the queries of all heads of a group, head after head.
    pub packed: bool,
    /// The output is a partial one, of `splits` parts.
    pub split: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward<
    E: Float,
    K: Numeric,
    C: Float,
    O: Float,
    M: Numeric,
    F: Float,
    S: Float,
    N: Size,
    W: Size,
>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<K, W>>,
    value: &Tensor<Vector<K, W>>,
    key_scales: ComptimeOption<&Tensor<f32>>,
    value_scales: ComptimeOption<&Tensor<f32>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    sinks: ComptimeOption<&Tensor<S>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    grid: Grid,
    extent: Extent,
    score: ScoreArguments,
    group: u32,
    head_dim: u32,
    value_dim: u32,
    #[comptime] kind: ForwardKind,
    #[define(E)] _element: ElemType,
    #[define(K)] _key_element: ElemType,
    #[define(C)] _product_element: ElemType,
    #[define(O)] _output_element: ElemType,
    #[define(M)] _mask_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(S)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(W)] _key_vector: usize,
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
    let sight = sight(extent, lengths_and_ids, batch, kind.structure);

    // Rows of the tile: queries of one head, or of all heads of a group.
    let mut kv_head = work_tile.head;
    let mut first_head = work_tile.head;
    let mut row_count = extent.q_len;
    if comptime!(kind.packed) {
        first_head = work_tile.head * group;
        row_count = extent.q_len * group as i32;
    } else {
        kv_head = work_tile.head / group;
    }
    let first_row = (work_tile.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), row_count);

    // The first and the last query of the tile, between which the others lie.
    let mut first_query = first_row;
    let mut last_query = end_row - 1i32;
    if comptime!(kind.packed) {
        let straddles = first_row / extent.q_len != last_query / extent.q_len;
        first_query = select(straddles, 0i32, first_row % extent.q_len);
        last_query = select(straddles, extent.q_len - 1i32, last_query % extent.q_len);
    }
    let full = first_row + comptime!(tiles.rows as i32) <= row_count;
    let keys = visible_keys(&sight, first_query, last_query, full);

    let block_size = comptime!(tiles.columns() as i32);
    // Packed rows are queries from all over the sequence, whose bounds are kept as one block.
    let mut query_block = work_tile.tile;
    if comptime!(kind.packed) {
        query_block = 0u32;
    }
    let blocks = within_segments(
        keys.first / block_size,
        block_count(keys.end, block_size),
        extent,
        lengths_and_ids,
        batch,
        query_block,
        Side::Queries,
        kind.structure,
    );
    let mut block = blocks.first;
    let mut end_block = blocks.end;
    if comptime!(kind.split) {
        let blocks = max(end_block - block, 0i32);
        let each = (blocks + grid.splits as i32 - 1i32) / grid.splits as i32;
        block += work_tile.split as i32 * each;
        end_block = min(block + each, end_block);
    }

    let head_length = extent.q_len as u32;
    let query_rows = group_rows(
        query,
        batch,
        first_head,
        head_length,
        first_row,
        end_row,
        head_dim,
    );
    let query = operand(query, query_rows);
    let key = head_operand(key, batch, kv_head, keys.first, keys.end, head_dim);
    let value = head_operand(value, batch, kv_head, keys.first, keys.end, value_dim);

    let mut stage = new_stage::<C>(tiles);
    let mut p_tile = new_tile::<C>(tiles);
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns()));
    let mut statistics = row_statistics(tiles);
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut sums = Array::<f32>::new(comptime!(tiles.rows_per_unit()));
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        sums[k] = 0.0f32;
    }
    let mut o = zero_output(tiles);
    hold(&query, first_row, &mut stage, kind.packed, 0usize, tiles);

    while block < end_block {
        let visited = segments_meet(
            extent,
            lengths_and_ids,
            batch,
            query_block,
            block as u32,
            kind.structure,
        );
        if visited {
            let first = block * block_size;
            stage_block(&key, &value, first, &mut stage, tiles);
            multiply_transposed(
                &query,
                first_row,
                &key,
                first,
                &mut stage,
                &mut s,
                tiles,
                kind.packed,
                0usize,
            );
            times_scales(
                &mut s,
                &key_scales,
                batch,
                kv_head,
                first,
                &key.rows,
                false,
                tiles,
            );
            let whole = is_whole(&keys, first, block_size, kind.structure);
            let rows = ScoreRows {
                batch,
                first_head,
                first_row,
                end_row,
                first_key: first,
            };
            if comptime!(tiles.is_direct()) {
                score_block(&mut s, rows, whole, &scoring, &sight, kind);
            } else if whole {
                // Without a branch a score.
                score_block(&mut s, rows, true, &scoring, &sight, kind);
            } else {
                score_block(&mut s, rows, false, &scoring, &sight, kind);
            }
            advance(&mut s, &mut sums, &mut statistics, tiles);
            times_scales(
                &mut s,
                &value_scales,
                batch,
                kv_head,
                first,
                &value.rows,
                true,
                tiles,
            );
            store_tile(&s, &mut p_tile, 1usize, tiles);
            if comptime!(tiles.has_fragments()) {
                tell_moved(&mut statistics, tiles);
            }
            rescale(
                &mut o,
                &statistics.factor,
                &statistics.moved,
                &mut stage,
                tiles,
            );
            accumulate(
                &p_tile,
                &value,
                first,
                &mut stage,
                &mut used,
                &mut o,
                1usize,
                comptime!(kind.score.leaves_masked(&kind.structure)),
                tiles,
            );
        }
        block += 1i32;
    }

    // The parts lie one after the other, each with all sequences.
    let mut part = batch;
    if comptime!(kind.split) {
        part += work_tile.split * (grid.planes / grid.heads);
    }
    // Normalise: the sink joins the sum here, where it is no part of a split.
    let mut sum = total(&sums, &mut statistics, tiles);
    let row = first_row + UNIT_POS as i32;
    if UNIT_POS < comptime!(tiles.rows as u32) {
        let mut head = first_head;
        let mut query_index = row;
        if comptime!(kind.packed) {
            head += (row / extent.q_len) as u32;
            query_index = row % extent.q_len;
        }
        let mut reference = statistics.maximum[UNIT_POS as usize];
        let mut rescale = 1.0f32;
        // A NaN among the scores is a key that is seen.
        let has_keys = sum != 0.0f32;
        #[comptime]
        match &sinks {
            ComptimeOption::Some(sinks) => {
                if row < end_row {
                    let sink = f32::cast_from(sinks[head as usize * sinks.stride(0)]);
                    let largest = max(reference, sink);
                    rescale = (reference - largest).exp();
                    sum = sum * rescale + (sink - largest).exp();
                    reference = largest;
                }
            }
            ComptimeOption::None => {}
        }
        let empty = sum == 0.0f32;
        statistics.factor[UNIT_POS as usize] = select(empty, 0.0f32, rescale / sum);
        if row < end_row {
            let at = part as usize * logsumexp.stride(0)
                + head as usize * logsumexp.stride(1)
                + query_index as usize;
            let to_logarithms = logsumexp.shape(0) / 2 * logsumexp.stride(0);
            logsumexp[at] = select(empty, score.negative_infinity, reference);
            logsumexp[at + to_logarithms] = saved_logarithm(sum, has_keys);
        }
    }
    sync_cube();
    let output_rows = group_rows(
        &*output,
        part,
        first_head,
        head_length,
        first_row,
        end_row,
        value_dim,
    );
    store_output(
        &o,
        &statistics.factor,
        &mut stage,
        output,
        &output_rows,
        first_row,
        kind.packed,
        tiles,
    );
}

/// Where a tile's rows and a block's columns lie.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct ScoreRows {
    batch: u32,
    first_head: u32,
    first_row: i32,
    end_row: i32,
    first_key: i32,
}

/// Makes scores of the unit's dots: −∞ of what is hidden, which is nothing where the block is `whole`.
#[cube]
fn score_block<M: Numeric, F: Float>(
    s: &mut Array<f32>,
    rows: ScoreRows,
    whole: bool,
    scoring: &Scoring<'_, '_, '_, M, F>,
    sight: &Sight,
    #[comptime] kind: ForwardKind,
) {
    let tiles = comptime!(kind.tiles);
    let width = comptime!(tiles.columns_per_unit());
    let unit_row = unit_row(tiles);
    let unit_column = unit_column(tiles);
    let q_len = scoring.extent.q_len;
    let hidden = scoring.arguments.negative_infinity;
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let row = rows.first_row + tile_row(unit_row, k, tiles) as i32;
        let mut head = rows.first_head;
        let mut query = row;
        if comptime!(kind.packed) {
            head += (row / q_len) as u32;
            query = select(row < rows.end_row, row % q_len, q_len);
        }
        #[unroll]
        for c in 0..width {
            let place = Place {
                batch: rows.batch,
                head,
                query,
                key: rows.first_key + tile_column(unit_column, c, tiles) as i32,
            };
            let mut value = hidden;
            if is_visible(whole, scoring, sight, &place, kind.structure) {
                let dot = s[comptime!(k * width + c)];
                let score = capped(dot, &scoring.arguments, kind.score);
                value = biased(score, &scoring.bias, &place, hidden);
            }
            s[comptime!(k * width + c)] = value;
        }
    }
}

/// Multiplies the unit's part of a tile by its columns' scales, if there are some. Where `zeros_stay`, what is 0 stays 0 even if the scale
/// is no number: nobody sees that row.
#[cube]
fn times_scales(
    s: &mut Array<f32>,
    scales: &ComptimeOption<&Tensor<f32>>,
    batch: u32,
    kv_head: u32,
    first: i32,
    rows: &Rows,
    #[comptime] zeros_stay: bool,
    #[comptime] tiles: UnitTiles,
) {
    #[comptime]
    match scales {
        ComptimeOption::Some(scales) => {
            let width = comptime!(tiles.columns_per_unit());
            let unit_column = unit_column(tiles);
            let of_head = batch as usize * scales.stride(0) + kv_head as usize * scales.stride(1);
            #[unroll]
            for c in 0..width {
                let row = first + tile_column(unit_column, c, tiles) as i32;
                let mut scale = 0.0f32;
                if row >= rows.first && row < rows.end {
                    scale = scales[of_head + row as usize * scales.stride(2)];
                }
                #[unroll]
                for k in 0..comptime!(tiles.rows_per_unit()) {
                    let at = comptime!(k * width + c);
                    let value = s[at];
                    s[at] = if comptime!(zeros_stay) {
                        select(value == 0.0f32, 0.0f32, value * scale)
                    } else {
                        value * scale
                    };
                }
            }
        }
        ComptimeOption::None => {}
    }
}
