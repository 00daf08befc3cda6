//! What a cube works on: a tile of queries, its rows, and the blocks of keys that it may see.

use super::bias::bias_of_head;
use super::scoring::{Masking, Scoring};
use super::visits::next_block;
use super::{FragmentKind, RowPair};
use crate::math::schedule::{Grid, Schedule, WorkTile, assignment, block_count};
use crate::math::side::Side;
use crate::math::visibility::{Run, Sight, sight, visible_keys, within_segments};
use cubecl::prelude::*;

/// What a kernel is compiled for whose cubes work on tiles of fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TileKind {
    pub fragment: FragmentKind,
    /// Query heads of a group that share a tile.
    pub heads: usize,
    /// The output is a partial one, of `splits` parts.
    pub split: bool,
}

impl TileKind {
    /// Whether keys in the middle of a block may be hidden from a whole tile.
    pub(crate) const fn leaves_masked(&self) -> bool {
        self.fragment.score.leaves_masked(&self.fragment.structure)
    }

    /// Whether it is known beforehand what tiles see of blocks by the mask.
    pub(crate) const fn sums_up_mask(&self) -> bool {
        self.fragment.structure.mask && self.heads == 1
    }
}

/// All tiles, and the order in which cubes take them.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct TileScheduler {
    pub grid: Grid,
    pub schedule: Schedule,
    /// Query heads of a head of keys.
    pub group: u32,
}

/// A tile of queries and the keys it sees.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Tile {
    pub batch: u32,
    pub kv_head: u32,
    /// Of the first row, head by head where heads share a tile.
    pub first_head: u32,
    pub first_query: i32,
    /// Rows that exist.
    pub rows: i32,
    /// Rows of a head: all of them, or the queries of each head that shares the tile.
    pub head_rows: i32,
    /// The number of the tile among the blocks of queries that segments are bounded by.
    pub query_block: u32,
    /// What its sequence sees.
    pub sight: Sight,
    pub keys: Run,
    /// Blocks to visit.
    pub first_block: i32,
    pub end_block: i32,
    /// Where the output goes: the sequence, counted through the parts.
    pub part: u32,
}

/// What a cube works on in one turn.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct AssignedTile {
    pub exists: bool,
    pub tile: Tile,
    /// The first block that it visits, or the end of its blocks.
    pub first: i32,
}

/// A cube's `turn`-th tile, at `item`: `rows` queries, keys in blocks of `block`.
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
    let sight = sight(
        &masking.extent,
        &masking.lengths_and_ids,
        assignment.work_tile.batch,
        structure,
    );
    let tile = tile(
        assignment.work_tile,
        sight,
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

/// The tile of a cube with this share.
#[cube]
fn tile(
    work_tile: WorkTile,
    sight: Sight,
    scheduler: &TileScheduler,
    masking: &Masking,
    #[comptime] rows: usize,
    #[comptime] block: usize,
    #[comptime] kind: TileKind,
) -> Tile {
    let grid = &scheduler.grid;
    let group = scheduler.group;
    let extent = &masking.extent;
    let heads = comptime!(kind.heads as u32);
    let mut kv_head = work_tile.head;
    let mut first_head = work_tile.head;
    let mut first_query = (work_tile.tile * comptime!(rows as u32)) as i32;
    let mut head_rows = i32::new(comptime!(rows as i64));
    let mut existing = min(head_rows, extent.q_len - first_query);
    let mut end_query = first_query + existing;
    let mut query_block = work_tile.tile;
    if comptime!(kind.heads > 1) {
        first_head = work_tile.head * group + work_tile.tile * heads;
        first_query = 0i32;
        head_rows = extent.q_len;
        existing = min(heads, group - work_tile.tile * heads) as i32 * extent.q_len;
        end_query = extent.q_len;
        query_block = 0u32;
    } else {
        kv_head = work_tile.head / group;
    }
    // Rows that do not exist may see what the others see, but they must not read a bias.
    let mut full = true;
    if comptime!(kind.fragment.has_own_biases()) {
        full = existing == comptime!(rows as i32);
    }
    let keys = visible_keys(&sight, first_query, end_query - 1i32, full);
    let size = comptime!(block as i32);
    let mut first_block = keys.first / size;
    let mut end_block = block_count(keys.end, size);
    if comptime!(kind.fragment.structure.segments) {
        let blocks = within_segments(
            first_block,
            end_block,
            extent,
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
        sight,
        keys,
        first_block,
        end_block,
        part,
    }
}

/// Rows `first` and `first + 8` of a tile.
#[cube]
pub(crate) fn row_pair<F: Float, NB: Size>(
    tile: &Tile,
    scoring: &Scoring<F, NB>,
    first: i32,
    #[comptime] kind: TileKind,
) -> RowPair {
    let extent = &scoring.masking.extent;
    let second = first + 8i32;
    let mut head_0 = tile.first_head;
    let mut head_1 = tile.first_head;
    let mut position_0 = tile.first_query + first;
    let mut position_1 = tile.first_query + second;
    if comptime!(kind.heads > 1) {
        // Of a row that does not exist, the last one's mask and bias are read.
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
        position_0: select(first < tile.rows, position_0, extent.q_len),
        position_1: select(second < tile.rows, position_1, extent.q_len),
        sight: tile.sight,
        bias_of_head: bias_of_head::<F, NB>(
            &scoring.bias,
            tile.batch,
            tile.first_head,
            kind.fragment,
        ),
    }
}
