//! What a cube holds for the backward, a tile of queries or of keys, and the blocks of the other side that it passes over: of
//! one head, or, where it holds keys, of each query head of the group.

use super::bias::bias_of_head;
use super::gradient::terms_of_rows;
use super::output::{OutputPart, OutputRow, OutputRows, write_rows};
use super::scoring::{Masking, Scoring};
use super::view::{View, view};
use super::visits::{TilePosition, meets};
use super::work_tile::TileKind;
use super::{FragmentKind, RowPair, rows_end};
use crate::math::schedule::{Grid, WorkTile, block_count, work_tile};
use crate::math::side::Side;
use crate::math::visibility::{
    Extent, Run, Sight, sight, visible_keys, visible_queries, within_segments,
};
use crate::passes::delta::kernel::is_blind;
use cube_kit::hopper::accumulator::{Pair, pair};
use cubecl::prelude::*;

/// A tile that is held.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Stationary {
    pub batch: u32,
    /// Of the tile: a query head, or a head of keys.
    pub head: u32,
    pub first_row: i32,
    /// Rows that exist.
    pub rows: i32,
    /// The number of the tile among the blocks that segments are bounded by.
    pub row_block: u32,
    /// What its sequence sees.
    pub sight: Sight,
    /// What any row sees on the other side.
    pub run: Run,
    pub first_block: i32,
    pub end_block: i32,
    /// Heads of the other side: the first, and how many.
    pub first_head: u32,
    pub heads: u32,
}

/// The tile of a cube with this share.
#[cube]
pub(crate) fn held(
    work_tile: WorkTile,
    masking: &Masking,
    group: u32,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
    #[comptime] kind: TileKind,
) -> Stationary {
    let extent = &masking.extent;
    let lengths_and_ids = &masking.lengths_and_ids;
    let structure = comptime!(kind.fragment.structure);
    let sight = sight(extent, lengths_and_ids, work_tile.batch, structure);
    let side = comptime!(kind.fragment.side);
    let first_row = (work_tile.tile * comptime!(rows as u32)) as i32;
    let size = comptime!(columns as i32);
    let existing = min(comptime!(rows as i32), rows_end(extent, side) - first_row);
    // Keys past the sequence's length are seen by nobody.
    let exist = min(first_row + existing, sight.length);
    let run = if comptime!(side == Side::Queries) {
        // Rows that do not exist may see what the others see, but they must not read a bias.
        let full = existing == comptime!(rows as i32) || comptime!(!kind.fragment.has_own_biases());
        visible_keys(&sight, first_row, first_row + existing - 1i32, full)
    } else {
        let full = first_row + comptime!(rows as i32) <= exist;
        visible_queries(&sight, first_row, exist - 1i32, full)
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
    let blocks = within_segments(
        run.first / size,
        block_count(run.end, size),
        extent,
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
        sight,
        run,
        first_block: blocks.first,
        end_block: blocks.end,
        first_head,
        heads,
    }
}

/// The share of cube `index`. Under a causal mask the last queries see the most keys, and the first keys are seen by the most queries.
#[cube]
pub(crate) fn stationary_work_tile(grid: &Grid, index: u32, #[comptime] side: Side) -> WorkTile {
    work_tile(grid, index, comptime!(side == Side::Queries))
}

/// A block of one of the other side's heads.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Visit {
    /// Counted from the tile's first; `heads` of it when there is nothing left.
    pub head: u32,
    pub block: i32,
}

/// Where the tile stands towards the blocks of a head.
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

/// The first visit of a tile.
#[cube]
pub(crate) fn first_visit(
    tile: &Stationary,
    masking: &Masking,
    #[comptime] kind: TileKind,
) -> Visit {
    let head = select(tile.first_block < tile.end_block, 0u32, tile.heads);
    visit_from(tile, head, tile.first_block, masking, kind)
}

/// The first visit from a block of a head on.
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
    if comptime!(kind.fragment.structure.segments || kind.sums_up_mask()) {
        let mut searching = head < tile.heads;
        while searching {
            let tile_position = position_of(tile, head, kind.fragment.side);
            if meets(&tile_position, block, masking, kind) {
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

/// Rows `first` and `first + 8` of the tile, as one of the heads sees them.
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
    let end = rows_end(&scoring.masking.extent, side);
    RowPair {
        batch: tile.batch,
        head_0: query_head,
        head_1: query_head,
        position_0: min(tile.first_row + first, end),
        position_1: min(tile.first_row + first + 8i32, end),
        sight: tile.sight,
        bias_of_head: bias_of_head::<F, NB>(&scoring.bias, tile.batch, query_head, kind),
    }
}

/// How the thread's rows see a block of one of the heads.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Seen {
    pub rows: RowPair,
    pub view: View,
}

/// How rows `row` and `row + 8` of the tile see `columns` columns of a block of `size`, from its `first_word`-th 32 on.
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
        view: view(
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

/// What a thread's two rows of a gradient are multiplied with: 0 for a query that sees nothing, whatever others of its tile have
/// seen.
#[cube]
pub(crate) fn row_factors(
    terms: &Tensor<f32>,
    tile: &Stationary,
    row: i32,
    extent: &Extent,
    factor: f32,
    #[comptime] kind: FragmentKind,
) -> Pair {
    let mut factors = pair(factor, factor);
    if comptime!(kind.side == Side::Queries) {
        let first_row = tile.first_row + row;
        let terms = terms_of_rows(terms, tile.batch, tile.head, first_row, extent, kind);
        factors = pair(
            select(is_blind(terms.references.first), 0.0f32, factor),
            select(is_blind(terms.references.second), 0.0f32, factor),
        );
    }
    factors
}

/// Writes rows `row` and `row + 8` of the tile of a gradient, as far as they exist: `columns` columns from `first_column` on, as far as
/// the tensor's `width` goes.
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

/// The place of a row of the tile in its gradient.
#[cube]
fn gradient_row(tile: &Stationary, row: i32) -> OutputRow {
    OutputRow {
        part: tile.batch,
        head: tile.head,
        position: tile.first_row + row,
        exists: row < tile.rows,
    }
}
