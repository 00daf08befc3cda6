//! The stationary tile of a backward CTA, and the blocks that the tile streams. A tile of queries streams the key
//! blocks of one KV head. A tile of keys streams the query blocks of every query head in its GQA group.

use super::bias::bias_of_head;
use super::block_mask::{BlockMask, block_mask};
use super::block_range::{TilePosition, may_intersect};
use super::far::sum_of_flags;
use super::gradient::{LseDelta, lse_delta_of_rows};
use super::output::{OutputPart, OutputRow, OutputRows, write_rows};
use super::scoring::{Masking, Scoring};
use super::tile_scheduler::TileKind;
use super::{FragmentKind, RowPair, rows_end};
use crate::auxiliary::delta::kernel::is_blind;
use crate::math::schedule::{Grid, WorkTile, block_count, work_tile};
use crate::math::side::Side;
use crate::math::visibility::{
    Keys, Run, SeqInfo, SeqLens, seq_info, visible_keys, visible_queries, within_bounds,
};
use cube_kit::nvidia::accumulator::{Pair, pair};
use cubecl::prelude::*;

/// A stationary tile. A CTA keeps a tile of queries and streams blocks of keys, or keeps a tile of keys and streams blocks of
/// queries.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Stationary {
    pub batch: u32,
    /// The head of the tile: a query head or a KV head.
    pub head: u32,
    pub first_row: i32,
    /// The number of tile rows inside the problem. The remaining rows lie past the last query or key.
    pub rows: i32,
    /// The tile's index in the table that holds the segment bounds of each block.
    pub row_block: u32,
    /// The length and the window of the tile's sequence.
    pub seq_info: SeqInfo,
    /// The tile's visible range. For a tile of queries, the range is over keys. It covers the keys that window and
    /// sequence length leave visible to at least one of the tile's queries. For a tile of keys, the range is over
    /// queries in the same way.
    pub run: Run,
    pub first_block: i32,
    pub end_block: i32,
    /// The tile streams the blocks of one or several heads. This field is the index of the first streamed head: a KV
    /// head for a tile of queries, a query head for a tile of keys.
    pub first_head: u32,
    pub heads: u32,
    /// The index in the gradient's first dimension: `batch + split · batches`, where `batches` is the number of sequences.
    pub part: u32,
}

/// Returns the stationary tile at the indices in `work_tile`, with the whole range of blocks that the tile streams.
#[cube]
pub(crate) fn stationary_tile(
    work_tile: WorkTile,
    masking: &Masking,
    group: u32,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
    #[comptime] kind: TileKind,
) -> Stationary {
    let seq_lens = &masking.seq_lens;
    let lengths_and_ids = &masking.lengths_and_ids;
    let structure = comptime!(kind.fragment.structure);
    let seq_info = seq_info(seq_lens, lengths_and_ids, work_tile.batch, structure);
    let side = comptime!(kind.fragment.side);
    let first_row = (work_tile.tile * comptime!(rows as u32)) as i32;
    let size = comptime!(columns as i32);
    let existing = min(comptime!(rows as i32), rows_end(seq_lens, side) - first_row);
    // The tile may hold keys past the sequence's length. These keys do not count as existing rows, because no query
    // sees them.
    let exist = min(first_row + existing, seq_info.length);
    let run = if comptime!(side == Side::Queries) {
        // A partial tile has rows past the last query. In a fully visible block, the kernel also computes scores for
        // these rows. The bias tensor has no biases for these rows. With a mask mod, these rows could mark a key as
        // used although the key is hidden from all queries. With per-score biases or a mask mod, no block therefore
        // counts as fully visible for a partial tile.
        let full =
            existing == comptime!(rows as i32) || comptime!(!kind.fragment.hides_single_keys());
        visible_keys(
            &seq_info,
            first_row,
            first_row + existing - 1i32,
            full,
            structure,
        )
    } else {
        let full = first_row + comptime!(rows as i32) <= exist;
        visible_queries(&seq_info, first_row, exist - 1i32, full)
    };
    let heads = if comptime!(side == Side::Queries) {
        u32::new(1)
    } else {
        group
    };
    let first_head = if comptime!(side == Side::Queries) {
        work_tile.head / group
    } else {
        work_tile.head * group
    };
    let blocks = within_bounds(
        run.first / size,
        block_count(run.end, size),
        seq_lens,
        lengths_and_ids,
        work_tile.batch,
        work_tile.tile,
        side,
        structure,
    );
    Stationary {
        batch: work_tile.batch,
        head: work_tile.head,
        first_row,
        rows: existing,
        row_block: work_tile.tile,
        seq_info,
        run,
        first_block: blocks.first,
        end_block: blocks.end,
        first_head,
        heads,
        part: work_tile.batch,
    }
}

/// Returns the stationary tile at the indices in `work_tile`, with only the heads and blocks of its split. The splits
/// first divide the heads of a GQA group, and then the blocks of each head (see
/// [`crate::engine::tiling::GradientSplits`]).
#[cube]
pub(crate) fn stationary_tile_split(
    work_tile: WorkTile,
    grid: &Grid,
    masking: &Masking,
    group: u32,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
    #[comptime] kind: TileKind,
) -> Stationary {
    let whole = stationary_tile(work_tile, masking, group, rows, columns, kind);
    if comptime!(kind.split) {
        let heads = whole.heads;
        let head_splits = min(grid.splits, heads);
        let heads_each = heads.div_ceil(head_splits);
        let head = work_tile.split % head_splits * heads_each;
        let block_splits = (grid.splits / head_splits) as i32;
        let all = max(whole.end_block - whole.first_block, 0i32);
        let blocks_each = (all + block_splits - 1i32) / block_splits;
        let first = whole.first_block + (work_tile.split / head_splits) as i32 * blocks_each;
        Stationary {
            batch: whole.batch,
            head: whole.head,
            first_row: whole.first_row,
            rows: whole.rows,
            row_block: whole.row_block,
            seq_info: whole.seq_info,
            run: whole.run,
            first_block: first,
            end_block: min(first + blocks_each, whole.end_block),
            first_head: whole.first_head + head,
            heads: min(heads_each, heads - min(head, heads)),
            part: whole.batch + work_tile.split * (grid.planes / grid.heads),
        }
    } else {
        whole
    }
}

/// Returns the tile that CTA `index` processes. Under a causal mask, tiles with the most blocks come first: the last
/// queries, or the first keys.
#[cube]
pub(crate) fn stationary_work_tile(grid: &Grid, index: u32, #[comptime] side: Side) -> WorkTile {
    work_tile(grid, index, comptime!(side == Side::Queries))
}

/// One iteration of the loop over a stationary tile's blocks: a block of keys or queries, and the block's head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Visit {
    /// The index of the head, counted from the tile's `first_head`. After the last block, the index equals `heads`, the
    /// number of heads that the tile streams.
    pub head: u32,
    pub block: i32,
}

/// Returns the tile's indices in the table of segment bounds and in the mask. For a tile of keys, `head` is the index
/// of the streamed query head, counted from the tile's `first_head`. For a tile of queries, `head` is not used.
#[cube]
pub(crate) fn position_of(tile: &Stationary, head: u32, #[comptime] side: Side) -> TilePosition {
    let query_head = if comptime!(side == Side::Queries) {
        tile.head
    } else {
        tile.first_head + head
    };
    TilePosition {
        batch: tile.batch,
        head: query_head,
        row_block: tile.row_block,
        run: tile.run,
    }
}

/// Returns the first block that the tile must process, and the block's head.
#[cube]
pub(crate) fn first_visit(
    tile: &Stationary,
    masking: &Masking,
    #[comptime] kind: TileKind,
) -> Visit {
    let head = select(tile.first_block < tile.end_block, 0u32, tile.heads);
    visit_from(tile, head, tile.first_block, masking, kind)
}

/// Returns the first block that the tile must process, and this block's head. The search starts at block `block` of
/// head `head`.
#[cube]
pub(crate) fn visit_from(
    tile: &Stationary,
    head: u32,
    block: i32,
    masking: &Masking,
    #[comptime] kind: TileKind,
) -> Visit {
    let mut head = head;
    let mut block = block;
    if block >= tile.end_block && head < tile.heads {
        head += 1u32;
        block = tile.first_block;
    }
    if comptime!(kind.skips_blocks()) {
        let mut searching = head < tile.heads;
        while searching {
            let tile_position = position_of(tile, head, kind.fragment.side);
            if may_intersect(&tile_position, block, masking, kind) {
                searching = false;
            } else {
                block += 1i32;
                if block >= tile.end_block {
                    head += 1u32;
                    block = tile.first_block;
                }
                searching = head < tile.heads;
            }
        }
    }
    Visit { head, block }
}

/// Returns the thread's row pair, which is rows `first` and `first + 8` of the tile. For a tile of keys, mask and bias
/// are those of a query head. `head` is the index of this query head, counted from the tile's `first_head`.
#[cube]
pub(crate) fn stationary_rows<F: Float, NB: Size>(
    tile: &Stationary,
    scoring: &Scoring<F, NB>,
    first: i32,
    head: u32,
    #[comptime] kind: FragmentKind,
) -> RowPair {
    let side = comptime!(kind.side);
    let query_head = if comptime!(side == Side::Queries) {
        tile.head
    } else {
        tile.first_head + head
    };
    let end = rows_end(&scoring.masking.seq_lens, side);
    RowPair {
        batch: tile.batch,
        head_0: query_head,
        head_1: query_head,
        position_0: min(tile.first_row + first, end),
        position_1: min(tile.first_row + first + 8i32, end),
        seq_info: tile.seq_info,
        bias_of_head: bias_of_head::<F, NB>(&scoring.bias, tile.batch, query_head, kind),
    }
}

/// The thread's rows, and the visibility of one block to the tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Seen {
    pub rows: RowPair,
    pub block_mask: BlockMask,
}

/// Computes the visibility of a block of `size` columns to the tile. Also loads mask bits of rows `row` and `row + 8`.
/// The loaded bits cover `columns` columns of the block, starting at the block's column `32 · first_word`.
#[cube]
pub(crate) fn seen_by<F: Float, NB: Size>(
    tile: &Stationary,
    row: i32,
    head: u32,
    block: i32,
    first_word: u32,
    scoring: &Scoring<F, NB>,
    #[comptime] size: usize,
    #[comptime] columns: usize,
    #[comptime] kind: TileKind,
) -> Seen {
    let rows = stationary_rows::<F, NB>(tile, scoring, row, head, kind.fragment);
    let tile_position = position_of(tile, head, kind.fragment.side);
    Seen {
        rows,
        block_mask: block_mask(
            &tile_position,
            &rows,
            block,
            first_word,
            &scoring.masking,
            size,
            columns,
            kind,
        ),
    }
}

/// Returns the LSE and delta of rows `row` and `row + 8` if the tile holds queries.
///
/// If the tile holds keys, the function only sets the field `far` of the result. `far` is not 0 if this lane finds a
/// far query among the tile's streamed queries. A query is far if its LSE needs two f32 (see `far.rs`). A block has
/// `columns` queries. [`voted`](super::far::voted) combines `far` of all lanes into the field `may_have_far`. The
/// caller must call `voted` before it reads `may_have_far`.
#[cube]
pub(crate) fn lse_delta_of_tile<'a>(
    lse_delta: &'a Tensor<f32>,
    tile: &Stationary,
    row: i32,
    seq_lens: &SeqLens,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> LseDelta<'a> {
    let far = if comptime!(kind.side == Side::Keys) {
        let size = comptime!(columns as i32);
        let queries = Keys {
            first: tile.first_block * size,
            end: tile.end_block * size,
        };
        sum_of_flags(
            lse_delta,
            tile.batch,
            tile.first_head,
            tile.heads,
            queries,
            kind,
        )
    } else {
        0.0f32.runtime()
    };
    lse_delta_of_rows(lse_delta, tile.batch, tile.head, far, row, seq_lens, kind)
}

/// Returns one factor for each of a thread's two gradient rows: `factor`, or 0 for a query that sees no key. If the
/// factor is 0, the caller sets the gradient row to zeros. Otherwise this row could be NaN, because the GEMM multiplies
/// dS = 0 by keys that may be NaN.
#[cube]
pub(crate) fn row_factors(
    lse_delta: &Tensor<f32>,
    tile: &Stationary,
    row: i32,
    seq_lens: &SeqLens,
    factor: f32,
    #[comptime] kind: FragmentKind,
) -> Pair {
    let mut factors = pair(factor, factor);
    if comptime!(kind.side == Side::Queries) {
        let first_row = tile.first_row + row;
        let lse_delta = lse_delta_of_rows(
            lse_delta, tile.batch, tile.head, 0.0f32, first_row, seq_lens, kind,
        );
        factors = pair(
            select(is_blind(lse_delta.references.first), 0.0f32, factor),
            select(is_blind(lse_delta.references.second), 0.0f32, factor),
        );
    }
    factors
}

/// Writes columns `first_column` to `first_column + columns − 1` of the tile's rows `row` and `row + 8` to `gradient`. Rows
/// outside of the problem and columns at or past `width` are skipped.
#[cube]
pub(crate) fn write_gradient_rows<E: Float, N: Size, NG: Size>(
    part: OutputPart<NG>,
    gradient: &mut Tensor<Vector<E, N>>,
    tile: &Stationary,
    row: i32,
    first_column: u32,
    #[comptime] columns: usize,
    #[comptime] width: usize,
) {
    let rows = OutputRows {
        first: gradient_row(tile, row),
        second: gradient_row(tile, row + 8i32),
    };
    write_rows::<E, N, NG>(part, gradient, &rows, first_column, columns, width);
}

/// Returns the position of one of the tile's rows in the gradient tensor.
#[cube]
fn gradient_row(tile: &Stationary, row: i32) -> OutputRow {
    OutputRow {
        part: tile.part,
        head: tile.head,
        position: tile.first_row + row,
        exists: row < tile.rows,
    }
}
