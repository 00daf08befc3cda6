//! The forward kernel. A cube keeps a tile of queries in shared memory, and streams all blocks of keys that any of
//! these queries sees. The cube applies the online softmax.
//!
//! Tensors:
//!
//! - Query `[batch, q_heads, q_len, head_dim]`.
//! - Keys `[batch, kv_heads, kv_len, head_dim]` and values `[batch, kv_heads, kv_len, value_dim]`.
//! - Output `[splits · batch, q_heads, q_len, value_dim]`, f32 if there are several splits.
//! - Logsumexp `[2 · splits · batch, q_heads, q_len]`, f32. The first half of the first dimension holds the scores that
//!   the softmax subtracted, which are near the row maxima. The second half holds the natural logarithms of the row
//!   sums.
//!
//! Budget: [`UnitTiles::shared_memory`] of shared memory. A unit's registers hold `4 · rows_per_unit` elements of S,
//! `4 · output_rows · output_vectors` elements of O, and the operands of one multiplication. A unit has `rows_per_unit`
//! rows of S, and `output_rows` rows of O with `output_vectors` vectors of 4 columns each. A tile of `rows` queries and
//! a block of `columns` keys take `2 · rows · columns · (head_dim + value_dim)` FLOP. Bound: FMA and shared-memory
//! loads, see `tile_ops/product.rs`. The kernel writes the output, and two f32 values of the logsumexp per query.
//!
//! Decoding uses this kernel too. `packed` puts the query heads of a GQA group into the rows of one tile, so each key
//! is loaded once for all heads of the group. With `split`, each cube gets a range of the keys (split-KV), and writes a
//! normalized partial output and the logsumexp of this range. `auxiliary/combine/kernel.rs` combines the splits.
//!
//! Keys and values may be 8-bit codes, packed four to a 32-bit word, with one scale per row. The GEMMs multiply the
//! codes. The kernel multiplies the scores of a key by the key's scale. Before the second GEMM, the kernel multiplies
//! the probabilities by the scales of the values. The row sums do not include the scales of the values.
//!
//! Keys and values may lie in pages. The kernel looks up the page of each block in a page table.

use crate::engine::portable::common::softmax::{advance, row_statistics, signal_rescale, total};
use crate::math::dropout::kernel::{keep_factor, kept_scale};
use crate::math::inputs::{ForwardInputs, HeadSizes};
use crate::math::layout::{Page, Rows, group_rows, head_operand, in_page, operand, page_of};
use crate::math::longest_first::longest_first;
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{
    ScoreKind, Scoring, TileAndBlock, block_mask_shows, capped, final_score, is_visible,
    saved_logarithm,
};
use crate::math::score_mod::ScorePlace;
use crate::math::side::Side;
use crate::math::visibility::{
    SeqInfo, Structure, blocks_meet, is_whole, seq_info, visible_keys, within_bounds,
};
use crate::tile_ops::product::{
    accumulate, hold, multiply_transposed, new_stage, new_tile, rescale, stage_block, store_output,
    store_tile, zero_output,
};
use crate::tile_ops::score_layout::{tile_column, tile_row, unit_column, unit_row};
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// The compile-time settings of the forward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ForwardKind {
    pub tiles: UnitTiles,
    pub structure: Structure,
    pub score: ScoreKind,
    /// True if a tile's rows are the queries of all heads in a GQA group, one head after another.
    pub packed: bool,
    /// True if the keys are split (split-KV), so that the kernel writes one partial output per split.
    pub split: bool,
    /// The number of keys per page, a multiple of the keys per block. The field is 0 if the keys of a sequence are
    /// contiguous.
    pub page_len: usize,
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
    inputs: ForwardInputs<E, K, N, W>,
    scoring: Scoring<M, F>,
    sinks: ComptimeOption<&Tensor<S>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    grid: Grid,
    sizes: HeadSizes,
    #[comptime] kind: ForwardKind,
    #[define(E, K, C, O, M, F, S)] _elements: [ElemType; 7],
    #[define(N, W)] _vectors: [usize; 2],
) {
    let query = &inputs.query;
    let key = &inputs.key;
    let value = &inputs.value;
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
    let index = if comptime!(kind.packed) {
        index
    } else {
        longest_first(&grid, index, seq_lens, lengths_and_ids, kind.structure)
    };
    let work_tile = work_tile(&grid, index, true);
    let batch = work_tile.batch;
    let seq_info = seq_info(seq_lens, lengths_and_ids, batch, kind.structure);

    // The rows of a tile are queries of one head, or queries of all heads of a GQA group if the tile is packed.
    let mut kv_head = work_tile.head;
    let mut first_head = work_tile.head;
    let mut row_count = seq_lens.q_len;
    if comptime!(kind.packed) {
        first_head = work_tile.head * group;
        row_count = seq_lens.q_len * group as i32;
    } else {
        kv_head = work_tile.head / group;
    }
    let first_row = (work_tile.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), row_count);

    // No query of the tile lies before `first_query` or after `last_query`. If the tile has rows of several heads,
    // these bounds enclose the whole sequence.
    let mut first_query = first_row;
    let mut last_query = end_row - 1i32;
    if comptime!(kind.packed) {
        let straddles = first_row / seq_lens.q_len != last_query / seq_lens.q_len;
        first_query = select(straddles, 0i32, first_row % seq_lens.q_len);
        last_query = select(
            straddles,
            seq_lens.q_len - 1i32,
            last_query % seq_lens.q_len,
        );
    }
    let full = first_row + comptime!(tiles.rows as i32) <= row_count;
    let keys = visible_keys(&seq_info, first_query, last_query, full, kind.structure);

    let block_size = comptime!(tiles.columns() as i32);
    // Packed rows are queries from the whole sequence. The launch makes query block 0 as large as the whole sequence,
    // so the segment bounds of block 0 hold for every tile.
    let mut query_block = work_tile.tile;
    if comptime!(kind.packed) {
        query_block = 0u32;
    }
    let blocks = within_bounds(
        keys.first / block_size,
        block_count(keys.end, block_size),
        seq_lens,
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

    let head_length = seq_lens.q_len as u32;
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
    let page_len = comptime!(kind.page_len);
    let sequence = if comptime!(page_len > 0) {
        u32::new(0)
    } else {
        batch
    };
    let key = head_operand(key, sequence, kv_head, keys.first, keys.end, head_dim);
    let value = head_operand(value, sequence, kv_head, keys.first, keys.end, value_dim);

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
        let visited = blocks_meet(
            seq_lens,
            lengths_and_ids,
            batch,
            query_block,
            block as u32,
            kind.structure,
        );
        let visited = if comptime!(kind.structure.has_block_mask()) {
            let mut last_head = first_head;
            if comptime!(kind.packed) {
                last_head += group - 1u32;
            }
            let pair = TileAndBlock {
                batch,
                first_head,
                last_head,
                first_query,
                last_query,
                first_key: block * block_size,
                last_key: (block + 1i32) * block_size - 1i32,
            };
            visited && block_mask_shows(&scoring, &pair, kind.structure)
        } else {
            visited
        };
        if visited {
            let first = block * block_size;
            // A block lies in only one page, because a page holds a whole number of blocks.
            let page = page_of(&inputs.page_table, key.tensor, batch, first, page_len);
            let key = in_page(key, &page, page_len);
            let value = in_page(value, &page, page_len);
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
                &inputs.key_scales,
                &page,
                kv_head,
                first,
                &key.rows,
                false,
                kind,
            );
            let whole = is_whole(
                &keys,
                first,
                seq_lens,
                lengths_and_ids,
                batch,
                query_block,
                block as u32,
                block_size,
                kind.structure,
            );
            let rows = ScoreRows {
                batch,
                first_head,
                first_row,
                end_row,
                first_key: first,
            };
            if comptime!(tiles.is_direct()) {
                score_block(&mut s, rows, whole, &scoring, &seq_info, kind);
            } else if whole {
                // Branch on `whole` (fully visible) once per block, so that a whole block needs no branch per score.
                score_block(&mut s, rows, true, &scoring, &seq_info, kind);
            } else {
                score_block(&mut s, rows, false, &scoring, &seq_info, kind);
            }
            advance(&mut s, &mut sums, &mut statistics, tiles);
            drop_probabilities(&mut s, rows, &scoring, kind);
            times_scales(
                &mut s,
                &inputs.value_scales,
                &page,
                kv_head,
                first,
                &value.rows,
                true,
                kind,
            );
            store_tile(&s, &mut p_tile, 1usize, tiles);
            if comptime!(tiles.has_fragments()) {
                signal_rescale(&mut statistics, tiles);
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

    // The first dimension of the partial outputs has `splits · batch` entries: all sequences of split 0, then those of
    // split 1, and so on.
    let mut part = batch;
    if comptime!(kind.split) {
        part += work_tile.split * (grid.planes / grid.heads);
    }
    // Without splits, this kernel adds the sink to the row sum. With splits, the combine kernel adds the sink.
    let mut sum = total(&sums, &mut statistics, tiles);
    let row = first_row + UNIT_POS as i32;
    if UNIT_POS < comptime!(tiles.rows as u32) {
        let mut head = first_head;
        let mut query_index = row;
        if comptime!(kind.packed) {
            head += (row / seq_lens.q_len) as u32;
            query_index = row % seq_lens.q_len;
        }
        let mut reference = statistics.maximum[UNIT_POS as usize];
        let mut rescale = 1.0f32;
        // A row with visible keys has a row sum that is not 0. A row with NaN scores has a NaN sum, so it also counts
        // as having visible keys.
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
        if comptime!(kind.score.dropout) {
            rescale *= kept_scale(&scoring.dropout);
        }
        statistics.factor[UNIT_POS as usize] = select(empty, 0.0f32, rescale / sum);
        if row < end_row {
            let at = part as usize * logsumexp.stride(0)
                + head as usize * logsumexp.stride(1)
                + query_index as usize;
            let to_logarithms = logsumexp.shape(0) / 2 * logsumexp.stride(0);
            logsumexp[at] = select(empty, scoring.arguments.negative_infinity, reference);
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

/// The position of a cube's scores for one block of keys: the sequence, the tile's first query head and rows, and the
/// block's first key.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct ScoreRows {
    batch: u32,
    first_head: u32,
    first_row: i32,
    end_row: i32,
    first_key: i32,
}

/// The query head and the query index of a tile's row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct HeadQuery {
    head: u32,
    query: i32,
}

/// Returns the head and the query of a tile's row. If `packed`, the tile has rows of several heads. A row past the last
/// valid row gets the query index `q_len`, for which all keys are hidden.
#[cube]
fn query_of_row(rows: ScoreRows, row: i32, q_len: i32, #[comptime] packed: bool) -> HeadQuery {
    let mut head = rows.first_head;
    let mut query = row;
    if comptime!(packed) {
        head += (row / q_len) as u32;
        query = select(row < rows.end_row, row % q_len, q_len);
    }
    HeadQuery { head, query }
}

/// Turns the unit's products `q·k` into masked scores. The score of a hidden key is −∞. A `whole` block has no hidden keys.
#[cube]
fn score_block<M: Numeric, F: Float>(
    s: &mut Array<f32>,
    rows: ScoreRows,
    whole: bool,
    scoring: &Scoring<M, F>,
    seq_info: &SeqInfo,
    #[comptime] kind: ForwardKind,
) {
    let tiles = comptime!(kind.tiles);
    let width = comptime!(tiles.columns_per_unit());
    let unit_row = unit_row(tiles);
    let unit_column = unit_column(tiles);
    let q_len = scoring.seq_lens.q_len;
    let hidden = scoring.arguments.negative_infinity;
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let row = rows.first_row + tile_row(unit_row, k, tiles) as i32;
        let of_row = query_of_row(rows, row, q_len, kind.packed);
        #[unroll]
        for c in 0..width {
            let place = ScorePlace::new(
                rows.batch,
                of_row.head,
                of_row.query,
                rows.first_key + tile_column(unit_column, c, tiles) as i32,
                seq_info.offset,
            );
            let mut value = hidden;
            if is_visible(whole, scoring, seq_info, &place, kind.structure) {
                let dot = s[comptime!(k * width + c)];
                let score = capped(dot, &scoring.arguments, kind.score);
                value = final_score(score, scoring, place, kind.score);
            }
            s[comptime!(k * width + c)] = value;
        }
    }
}

/// Sets the unit's dropped probabilities to 0, if the kernel has dropout. The row sums include dropped probabilities. The
/// kernel later multiplies the output by `kept_scale`, which is 1 / (1 − drop probability).
#[cube]
fn drop_probabilities<M: Numeric, F: Float>(
    p: &mut Array<f32>,
    rows: ScoreRows,
    scoring: &Scoring<M, F>,
    #[comptime] kind: ForwardKind,
) {
    if comptime!(kind.score.dropout) {
        let tiles = comptime!(kind.tiles);
        let width = comptime!(tiles.columns_per_unit());
        let unit_row = unit_row(tiles);
        let unit_column = unit_column(tiles);
        let q_len = scoring.seq_lens.q_len;
        #[unroll]
        for k in 0..comptime!(tiles.rows_per_unit()) {
            let row = rows.first_row + tile_row(unit_row, k, tiles) as i32;
            let of_row = query_of_row(rows, row, q_len, kind.packed);
            #[unroll]
            for c in 0..width {
                let key = rows.first_key + tile_column(unit_column, c, tiles) as i32;
                let at = comptime!(k * width + c);
                let (query, key) = (of_row.query as u32, key as u32);
                let factor = keep_factor(&scoring.dropout, rows.batch, of_row.head, query, key);
                p[at] = select(factor == 0.0f32, 0.0f32, p[at]);
            }
        }
    }
}

/// Multiplies the unit's elements of `s` by scales of quantized rows. A score is multiplied by the scale of the score's
/// key. A probability is multiplied by the scale of the row of V that the probability weights. For float keys and
/// values, the function does nothing.
///
/// With `zeros_stay`, a probability of 0 stays 0 even if the scale is NaN. A row of V that no query sees thus has no
/// effect.
#[cube]
fn times_scales(
    s: &mut Array<f32>,
    scales: &ComptimeOption<OwnedTensor<f32>>,
    page: &Page,
    kv_head: u32,
    first: i32,
    rows: &Rows,
    #[comptime] zeros_stay: bool,
    #[comptime] kind: ForwardKind,
) {
    let (tiles, page_len) = comptime!((kind.tiles, kind.page_len));
    #[comptime]
    match scales {
        ComptimeOption::Some(scales) => {
            let width = comptime!(tiles.columns_per_unit());
            let unit_column = unit_column(tiles);
            let of_head =
                page.index as usize * scales.stride(0) + kv_head as usize * scales.stride(1);
            #[unroll]
            for c in 0..width {
                let row = first + tile_column(unit_column, c, tiles) as i32;
                let mut scale = 0.0f32;
                if row >= rows.first && row < rows.end {
                    let mut row = row;
                    if comptime!(page_len > 0) {
                        row -= page.first_key;
                    }
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
