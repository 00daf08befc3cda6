//! The forward: for a tile of queries, all keys that any of them sees, block by block, with the online softmax.
//!
//! Budget (unit engine): [`UnitTiles::shared_memory`]; registers a unit: `4 · rows_per_unit` of S,
//! `4 · output_rows · output_vectors` of O, the operands of one step. Work a block of keys:
//! `2 · rows · columns · (head_dim + value_dim)` FLOP; FMA and shared-memory loads bound it, see
//! `engine/unit.rs`. Memory: the output and one f32 a query.
//!
//! The same kernel decodes: `packed` puts the query heads of a group into one tile's rows, so that a key
//! is read once for all of them, and `split` gives each cube a part of the keys and writes a normalised
//! partial output with its logsumexp, which `decode/merge.rs` joins.

use super::engine::unit::{
    Rows, Vec4, accumulate, mark_used, multiply_transposed, store_output, store_tile, zero_output,
};
use super::schedule::{Grid, share};
use super::score::{HIDDEN, Place, ScoreArguments, ScoreKind, biased, capped, is_visible};
use super::softmax::{advance, row_statistics, total};
use super::visibility::{Extent, Structure, end_key, first_key, segments_meet, sight};
use crate::plan::unit::UnitTiles;
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
pub(crate) fn forward<E: Float, O: Float, M: Numeric, F: Float, S: Float, N: Size>(
    query: &Tensor<Vector<E, N>>,
    key: &Tensor<Vector<E, N>>,
    value: &Tensor<Vector<E, N>>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    integers: ComptimeOption<&Tensor<i32>>,
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
    #[define(O)] _output_element: ElemType,
    #[define(M)] _mask_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(S)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
) {
    let index = CUBE_POS as u32;
    if index >= grid.cubes {
        terminate!();
    }
    let tiles = comptime!(kind.tiles);
    let share = share(&grid, index, true);
    let batch = share.batch;
    let sight = sight(&extent, &integers, batch, kind.structure);

    // Rows of the tile: queries of one head, or of all heads of a group.
    let mut kv_head = share.head;
    let mut first_head = share.head;
    let mut row_count = extent.q_len;
    if comptime!(kind.packed) {
        first_head = share.head * group;
        row_count = extent.q_len * group as i32;
    } else {
        kv_head = share.head / group;
    }
    let first_row = (share.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), row_count);

    // The first and the last query of the tile, between which the others lie.
    let mut first_query = first_row;
    let mut last_query = end_row - 1i32;
    if comptime!(kind.packed) {
        let straddles = first_row / extent.q_len != last_query / extent.q_len;
        first_query = select(straddles, 0i32, first_row % extent.q_len);
        last_query = select(straddles, extent.q_len - 1i32, last_query % extent.q_len);
    }
    let keys_first = first_key(&sight, first_query);
    let keys_end = end_key(&sight, last_query);
    // Between these, every query of the tile sees every key.
    let common_first = first_key(&sight, last_query);
    let common_end = end_key(&sight, first_query);
    let rows_whole = first_row + comptime!(tiles.rows as i32) <= row_count;

    let block_size = comptime!(tiles.columns() as i32);
    let mut block = keys_first / block_size;
    let mut end_block = (keys_end + block_size - 1i32) / block_size;
    if comptime!(kind.split) {
        let blocks = max(end_block - block, 0i32);
        let each = (blocks + grid.splits as i32 - 1i32) / grid.splits as i32;
        block += share.split as i32 * each;
        end_block = min(block + each, end_block);
    }

    let query_rows = Rows {
        base: batch as usize * query.stride(0) + first_head as usize * query.stride(1),
        row_stride: query.stride(2),
        column_stride: query.stride(3),
        first: first_row,
        end: end_row,
        columns: head_dim,
        head_rows: extent.q_len as u32,
        head_stride: query.stride(1),
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
    let mut p_tile = Shared::<[Vec4]>::new_slice(comptime!(tiles.tile_vectors()));
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns()));
    let mut statistics = row_statistics(tiles);
    let mut s = Array::<f32>::new(comptime!(4 * tiles.rows_per_unit()));
    let mut sums = Array::<f32>::new(comptime!(tiles.rows_per_unit()));
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        sums[k] = 0.0f32;
    }
    let mut o = zero_output(tiles);
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);
    let output_row = UNIT_POS as usize / comptime!(tiles.output_units);

    let query_blocks = (extent.q_len as u32).div_ceil(comptime!(tiles.rows as u32));
    let key_blocks = (extent.kv_len as u32).div_ceil(comptime!(tiles.columns() as u32));
    while block < end_block {
        let mut visited = true;
        if comptime!(kind.structure.segments) {
            let mut query_block = batch * query_blocks + share.tile;
            if comptime!(kind.packed) {
                query_block = batch;
            }
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
                kind.packed,
            );
            let mut whole = rows_whole && first >= common_first && first + block_size <= common_end;
            if comptime!(kind.structure.is_irregular()) {
                whole = false;
            }
            #[unroll]
            for k in 0..comptime!(tiles.rows_per_unit()) {
                let row = first_row + (unit_row + k * comptime!(tiles.row_units())) as i32;
                let mut head = first_head;
                let mut query_index = row;
                if comptime!(kind.packed) {
                    head += (row / extent.q_len) as u32;
                    query_index = select(row < end_row, row % extent.q_len, extent.q_len);
                }
                #[unroll]
                for c in 0..4usize {
                    let place = Place {
                        batch,
                        head,
                        query: query_index,
                        key: first + (unit_column * 4 + c) as i32,
                    };
                    let mut visible = true;
                    if !whole {
                        visible =
                            is_visible(&mask, &sight, &extent, &integers, &place, kind.structure);
                    }
                    let mut value = f32::new(HIDDEN);
                    if visible {
                        value = biased(capped(s[k * 4 + c], &score, kind.score), &bias, &place);
                    }
                    s[k * 4 + c] = value;
                }
            }
            advance(&mut s, &mut sums, &mut statistics, tiles);
            store_tile(&s, &mut p_tile, tiles);
            #[unroll]
            for k in 0..comptime!(tiles.output_rows()) {
                let factor = Vec4::cast_from(
                    statistics.factor[output_row + k * comptime!(tiles.output_row_units())],
                );
                #[unroll]
                for v in 0..tiles.output_vectors {
                    o[comptime!(k * tiles.output_vectors + v)] *= factor;
                }
            }
            if comptime!(kind.score.leaves_holes(&kind.structure)) {
                mark_used(&p_tile, &mut used, tiles);
            }
            accumulate(
                &p_tile,
                value,
                &value_rows,
                first,
                &mut stage,
                &used,
                &mut o,
                comptime!(kind.score.leaves_holes(&kind.structure)),
                tiles,
            );
        }
        block += 1i32;
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
            let at = share.split as usize * logsumexp.stride(0)
                + batch as usize * logsumexp.stride(1)
                + head as usize * logsumexp.stride(2)
                + query_index as usize;
            logsumexp[at] = select(empty, score.negative_infinity, reference + sum.ln());
        }
    }
    sync_cube();
    let output_rows = Rows {
        base: share.split as usize * output.stride(0)
            + batch as usize * output.stride(1)
            + first_head as usize * output.stride(2),
        row_stride: value_dim as usize,
        column_stride: 1usize,
        first: first_row,
        end: end_row,
        columns: value_dim,
        head_rows: extent.q_len as u32,
        head_stride: output.stride(2),
    };
    store_output(
        &o,
        &statistics.factor,
        output,
        &output_rows,
        first_row,
        kind.packed,
        tiles,
    );
}
