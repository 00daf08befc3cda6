//! The work of a forward CTA: a tile of queries, its rows, and the blocks of keys that the tile must process.

use super::bias::bias_of_head;
use super::block_range::next_block;
use super::scoring::{Masking, Scoring};
use super::{FragmentKind, RowPair};
use crate::math::longest_first::longest_first;
use crate::math::schedule::{Grid, Schedule, WorkTile, assignment, block_count};
use crate::math::side::Side;
use crate::math::visibility::{Run, SeqInfo, seq_info, visible_keys, within_bounds};
use cubecl::prelude::*;

/// The compile-time settings of a kernel whose CTAs process tiles of queries or keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TileKind {
    pub fragment: FragmentKind,
    /// The number of query heads that share a tile, all from one GQA group. The number is 1 if each tile has rows of
    /// only one head.
    pub heads: usize,
    /// True if several CTAs share the blocks of a tile, so that each CTA writes a partial result.
    pub split: bool,
    /// The number of keys per page. The field is 0 if the keys of a sequence are contiguous. In the mma engine, a page is
    /// a multiple of the keys per block.
    pub page_len: usize,
}

impl TileKind {
    /// True if the visible keys of a block can have gaps: a key that no row of the tile sees can lie between two keys that
    /// some row of the tile sees.
    pub(crate) const fn leaves_masked(&self) -> bool {
        self.fragment.score.leaves_masked(&self.fragment.structure)
    }

    /// True if a tile may skip blocks between the first and the last block that it processes. If every query has one
    /// interval, and the problem has neither segments nor mask, a tile of queries processes every block of its block
    /// range.
    pub(crate) const fn skips_blocks(&self) -> bool {
        let structure = self.fragment.structure;
        let is_one_range = structure.intervals == 1
            && !structure.segments
            && matches!(self.fragment.side, Side::Queries);
        structure.has_bounds() && !is_one_range || self.sums_up_mask()
    }

    /// True if the launch has precomputed a mask summary for every tile and block. The summary tells whether the mask
    /// shows the tile all, some or none of the block.
    ///
    /// A tile with rows of several heads has summaries of a block mask only. Such tiles decode few queries, and without
    /// summaries they would read all keys.
    pub(crate) const fn sums_up_mask(&self) -> bool {
        let structure = self.fragment.structure;
        structure.mask && (self.heads == 1 || structure.has_block_mask())
    }
}

/// The launch grid of all tiles, and the order in which the CTAs process these tiles.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct TileScheduler {
    pub grid: Grid,
    pub schedule: Schedule,
    /// The number of query heads per KV head (the GQA group size).
    pub group: u32,
}

/// A tile of queries, and the range of keys that the tile streams.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Tile {
    pub batch: u32,
    pub kv_head: u32,
    /// The query head of the tile's first row. If a tile holds several heads, the rows of one head precede the rows of the
    /// next head.
    pub first_head: u32,
    pub first_query: i32,
    /// The number of tile rows that hold queries. The remaining rows lie past the last query of the problem.
    pub rows: i32,
    /// The number of tile rows per head. If several heads share the tile, the number is `q_len`. Otherwise, the number
    /// is the tile's row count.
    pub head_rows: i32,
    /// The tile's index in the table of segment bounds. The table holds the bounds of each block of queries.
    pub query_block: u32,
    /// The length and the window of the tile's sequence.
    pub seq_info: SeqInfo,
    pub keys: Run,
    /// The index of the first block of keys in the tile's range.
    pub first_block: i32,
    pub end_block: i32,
    /// The tile's index in the output's first dimension: `batch + split · (number of sequences)`.
    pub part: u32,
}

/// The tile that a CTA processes in one iteration of its loop over tiles.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct AssignedTile {
    pub exists: bool,
    pub tile: Tile,
    /// The first block that the tile must process, or `end_block` if there is no such block.
    pub first: i32,
}

/// Returns the work item that takes the place of `item`. With segments or intervals of visible keys, long tiles start
/// before short ones, see [`longest_first`]. An item past the last one stays as it is.
///
/// Split tiles and tiles that hold several heads keep their order: a launch with such tiles has few of them.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(crate) fn ordered_item(
    scheduler: &TileScheduler,
    item: u32,
    masking: &Masking,
    #[comptime] kind: TileKind,
) -> u32 {
    let mut ordered = item;
    if comptime!(kind.heads == 1 && !kind.split) {
        if item < scheduler.schedule.items {
            ordered = longest_first(
                &scheduler.grid,
                item,
                &masking.seq_lens,
                &masking.lengths_and_ids,
                kind.fragment.structure,
            );
        }
    }
    ordered
}

/// Returns the tile that the CTA processes in iteration `turn` of its loop. The work item `item` is one tile, which
/// takes one iteration, or a pair of tiles, which takes two. A tile has `rows` queries, and a block has `block` keys.
#[cube]
pub(crate) fn assigned_tile(
    scheduler: &TileScheduler,
    item: u32,
    turn: u32,
    masking: &Masking,
    #[comptime] rows: usize,
    #[comptime] block: usize,
    #[comptime] kind: TileKind,
) -> AssignedTile {
    let assignment = assignment(&scheduler.grid, &scheduler.schedule, item, turn);
    let structure = comptime!(kind.fragment.structure);
    let seq_info = seq_info(
        &masking.seq_lens,
        &masking.lengths_and_ids,
        assignment.work_tile.batch,
        structure,
    );
    let tile = tile(
        assignment.work_tile,
        seq_info,
        scheduler,
        masking,
        rows,
        block,
        kind,
    );
    AssignedTile {
        exists: assignment.exists,
        tile,
        first: next_block(&tile, tile.first_block, masking, kind),
    }
}

/// Returns the tile at the indices in `work_tile`: its queries, and the range of key blocks that it streams.
#[cube]
fn tile(
    work_tile: WorkTile,
    seq_info: SeqInfo,
    scheduler: &TileScheduler,
    masking: &Masking,
    #[comptime] rows: usize,
    #[comptime] block: usize,
    #[comptime] kind: TileKind,
) -> Tile {
    let grid = &scheduler.grid;
    let group = scheduler.group;
    let seq_lens = &masking.seq_lens;
    let heads = comptime!(kind.heads as u32);
    let mut kv_head = work_tile.head;
    let mut first_head = work_tile.head;
    let mut first_query = (work_tile.tile * comptime!(rows as u32)) as i32;
    let mut head_rows = i32::new(comptime!(rows as i64));
    let mut existing = min(head_rows, seq_lens.q_len - first_query);
    let mut end_query = first_query + existing;
    let mut query_block = work_tile.tile;
    if comptime!(kind.heads > 1) {
        first_head = work_tile.head * group + work_tile.tile * heads;
        first_query = 0i32;
        head_rows = seq_lens.q_len;
        existing = min(heads, group - work_tile.tile * heads) as i32 * seq_lens.q_len;
        end_query = seq_lens.q_len;
        query_block = 0u32;
    } else {
        kv_head = work_tile.head / group;
    }
    // A partial tile has rows past the last query. In a fully visible block, the kernel also computes scores for these
    // rows. The bias tensor has no biases for these rows. With a mask mod, these rows could mark a key as used although
    // the key is hidden from all queries. With per-score biases or a mask mod, no block therefore counts as fully
    // visible for a partial tile.
    let mut full = true;
    if comptime!(kind.fragment.hides_single_keys()) {
        full = existing == comptime!(rows as i32);
    }
    let keys = visible_keys(
        &seq_info,
        first_query,
        end_query - 1i32,
        full,
        kind.fragment.structure,
    );
    let size = comptime!(block as i32);
    let mut first_block = keys.first / size;
    let mut end_block = block_count(keys.end, size);
    if comptime!(kind.fragment.structure.has_bounds()) {
        let blocks = within_bounds(
            first_block,
            end_block,
            seq_lens,
            &masking.lengths_and_ids,
            work_tile.batch,
            query_block,
            Side::Queries,
            kind.fragment.structure,
        );
        first_block = blocks.first;
        end_block = blocks.end;
    }
    if comptime!(kind.split) {
        let blocks = max(end_block - first_block, 0i32);
        let each = (blocks + grid.splits as i32 - 1i32) / grid.splits as i32;
        first_block += work_tile.split as i32 * each;
        end_block = min(first_block + each, end_block);
    }
    let mut part = work_tile.batch;
    if comptime!(kind.split) {
        part = work_tile.batch + work_tile.split * (grid.planes / grid.heads);
    }
    Tile {
        batch: work_tile.batch,
        kv_head,
        first_head,
        first_query,
        rows: existing,
        head_rows,
        query_block,
        seq_info,
        keys,
        first_block,
        end_block,
        part,
    }
}

/// Returns the heads and positions of the two rows that a thread holds: rows `first` and `first + 8` of the tile.
#[cube]
pub(crate) fn row_pair<F: Float, NB: Size>(
    tile: &Tile,
    scoring: &Scoring<F, NB>,
    first: i32,
    #[comptime] kind: TileKind,
) -> RowPair {
    let seq_lens = &scoring.masking.seq_lens;
    let second = first + 8i32;
    let mut head_0 = tile.first_head;
    let mut head_1 = tile.first_head;
    let mut position_0 = tile.first_query + first;
    let mut position_1 = tile.first_query + second;
    if comptime!(kind.heads > 1) {
        // A row past the tile's last query gets the head of the last query, so that reads of mask and bias stay inside
        // the tensors.
        let last = tile.rows - 1i32;
        head_0 = tile.first_head + (min(first, last) / tile.head_rows) as u32;
        head_1 = tile.first_head + (min(second, last) / tile.head_rows) as u32;
        position_0 = first % tile.head_rows;
        position_1 = second % tile.head_rows;
    }
    RowPair {
        batch: tile.batch,
        head_0,
        head_1,
        position_0: select(first < tile.rows, position_0, seq_lens.q_len),
        position_1: select(second < tile.rows, position_1, seq_lens.q_len),
        seq_info: tile.seq_info,
        bias_of_head: bias_of_head::<F, NB>(
            &scoring.bias,
            tile.batch,
            tile.first_head,
            kind.fragment,
        ),
    }
}
