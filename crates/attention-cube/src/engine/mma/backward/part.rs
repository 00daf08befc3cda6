//! What a warp has of a tile's scores: one or two fragments of rows, and of a block all columns or a part of them.

use crate::fragment::FragmentKind;
use crate::fragment::far::has_far;
use crate::fragment::gradient::{Terms, terms_of_block, terms_of_rows};
use crate::fragment::scoring::Scoring;
use crate::fragment::stationary::{Seen, Stationary, seen_by};
use crate::fragment::work_tile::TileKind;
use crate::math::side::Side;
use crate::math::visibility::{Extent, Run, Sight};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::hopper::ptx::uniform;
use cubecl::prelude::*;

/// The sizes of a warp's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Part {
    /// Fragments of 16 rows: 1 or 2.
    pub fragments: usize,
    /// Columns of it.
    pub columns: usize,
    /// Columns of a block.
    pub block: usize,
}

/// The terms of both fragments' rows; of one alone, twice.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpTerms<'a> {
    pub first: Terms<'a>,
    pub second: Terms<'a>,
}

/// The terms of the thread's rows, of which `row` of the tile is the first, where these are queries.
#[cube]
pub(super) fn terms_of_warp<'a>(
    terms: &'a Tensor<f32>,
    tile: &Stationary,
    row: i32,
    extent: &Extent,
    #[comptime] part: Part,
    #[comptime] kind: FragmentKind,
) -> WarpTerms<'a> {
    let row = tile.first_row + row;
    let first = terms_of_rows(terms, tile.batch, tile.head, row, extent, kind);
    let second = if comptime!(part.fragments == 2) {
        let row = row + comptime!(FRAGMENT_ROWS as i32);
        terms_of_rows(terms, tile.batch, tile.head, row, extent, kind)
    } else {
        first
    };
    WarpTerms::<'a> { first, second }
}

/// Whether one of the warp's queries is far. The terms of a block's columns, where these are queries, are at `terms_at`; asked for
/// ahead of S, the vote waits for nothing.
#[cube]
pub(super) fn warp_has_far(
    terms: &WarpTerms<'_>,
    terms_at: u32,
    #[comptime] stride: usize,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> bool {
    if comptime!(kind.side == Side::Keys) {
        has_far(
            &terms_of_block(&terms.first, terms_at, stride),
            columns,
            kind,
        )
    } else {
        terms.first.rows_have_far || terms.second.rows_have_far
    }
}

/// How both fragments see a block; one alone, twice.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpSeen {
    pub first: Seen,
    pub second: Seen,
}

/// How the thread's rows, of which `row` of the tile is the first, see the part of a block from its `first_word`-th 32 columns on.
#[cube]
pub(super) fn seen_by_warp<F: Float, NB: Size>(
    tile: &Stationary,
    row: i32,
    head: u32,
    block: i32,
    first_word: u32,
    scoring: &Scoring<F, NB>,
    #[comptime] part: Part,
    #[comptime] kind: TileKind,
) -> WarpSeen {
    let first = seen_by::<F, NB>(
        tile,
        row,
        head,
        block,
        first_word,
        scoring,
        part.block,
        part.columns,
        kind,
    );
    let second = if comptime!(part.fragments == 2) {
        let row = row + comptime!(FRAGMENT_ROWS as i32);
        seen_by::<F, NB>(
            tile,
            row,
            head,
            block,
            first_word,
            scoring,
            part.block,
            part.columns,
            kind,
        )
    } else {
        first
    };
    WarpSeen { first, second }
}

/// The tile, known to be the same for all lanes where it was read from memory: it then takes none of a thread's own registers.
#[cube]
pub(super) fn alike(tile: Stationary) -> Stationary {
    let sight = tile.sight;
    let run = tile.run;
    Stationary {
        sight: Sight {
            length: uniform(sight.length as u32) as i32,
            offset: uniform(sight.offset as u32) as i32,
            q_len: sight.q_len,
            left: sight.left,
            right: sight.right,
        },
        run: Run {
            first: uniform(run.first as u32) as i32,
            end: uniform(run.end as u32) as i32,
            common_first: uniform(run.common_first as u32) as i32,
            common_end: uniform(run.common_end as u32) as i32,
        },
        first_block: uniform(tile.first_block as u32) as i32,
        end_block: uniform(tile.end_block as u32) as i32,
        batch: tile.batch,
        head: tile.head,
        first_row: tile.first_row,
        rows: tile.rows,
        row_block: tile.row_block,
        first_head: tile.first_head,
        heads: tile.heads,
    }
}
