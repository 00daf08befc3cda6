//! How a warp's fragments see a block, and P and dS of it.

use crate::engine::mma::fragments::{fragment_of, joined};
use crate::engine::mma::plan::GradientTiles;
use crate::fragment::FragmentKind;
use crate::fragment::gradient::{Terms, dot_gradients, terms_of_block, terms_of_rows, weights};
use crate::fragment::scoring::Scoring;
use crate::fragment::stationary::{Seen, Stationary, seen_by};
use crate::fragment::work_tile::TileKind;
use crate::math::visibility::Extent;
use cube_kit::ampere::FRAGMENT_ROWS;
use cubecl::prelude::*;

/// The terms of both fragments' rows; of one alone, twice.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpTerms {
    first: Terms,
    second: Terms,
}

/// The terms of the thread's rows, of which `row` of the tile is the first, where these are queries.
#[cube]
pub(super) fn terms_of_warp(
    terms: &Tensor<f32>,
    tile: &Stationary,
    row: i32,
    extent: &Extent,
    #[comptime] tiles: GradientTiles,
    #[comptime] kind: FragmentKind,
) -> WarpTerms {
    let row = tile.first_row + row;
    let first = terms_of_rows(terms, tile.batch, tile.head, row, extent, kind);
    let second = if comptime!(tiles.fragments == 2) {
        let row = row + comptime!(FRAGMENT_ROWS as i32);
        terms_of_rows(terms, tile.batch, tile.head, row, extent, kind)
    } else {
        first
    };
    WarpTerms { first, second }
}

/// How both fragments see a block; one alone, twice.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpSeen {
    pub first: Seen,
    second: Seen,
}

/// How the thread's rows see a block, of which `row` of the tile is the first.
#[cube]
pub(super) fn seen_by_warp<F: Float, NB: Size>(
    tile: &Stationary,
    row: i32,
    head: u32,
    block: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: GradientTiles,
    #[comptime] kind: TileKind,
) -> WarpSeen {
    let first = seen_by::<F, NB>(tile, row, head, block, scoring, tiles.columns, kind);
    let second = if comptime!(tiles.fragments == 2) {
        let row = row + comptime!(FRAGMENT_ROWS as i32);
        seen_by::<F, NB>(tile, row, head, block, scoring, tiles.columns, kind)
    } else {
        first
    };
    WarpSeen { first, second }
}

/// P and dS of a warp's rows, as left operands of products; each only where it is needed.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Made<AP: Size> {
    pub p: Vector<u32, AP>,
    pub ds: Vector<u32, AP>,
}

/// Makes P and dS of a block's S and dP. Its queries' terms, where these are the columns, are at `terms_at`.
#[cube]
pub(super) fn weigh<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size>(
    s: Vector<f32, AS>,
    dp: Vector<f32, AS>,
    seen: &WarpSeen,
    terms: &WarpTerms,
    terms_at: u32,
    block: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: GradientTiles,
    #[comptime] kind: FragmentKind,
) -> Made<AP> {
    let first = weigh_fragment::<F, NB, NS, NP>(
        fragment_of::<AS, NS>(s, 0usize),
        fragment_of::<AS, NS>(dp, 0usize),
        &seen.first,
        &terms.first,
        terms_at,
        block,
        scoring,
        tiles,
        kind,
    );
    let second = if comptime!(tiles.fragments == 2) {
        weigh_fragment::<F, NB, NS, NP>(
            fragment_of::<AS, NS>(s, 1usize),
            fragment_of::<AS, NS>(dp, 1usize),
            &seen.second,
            &terms.second,
            terms_at,
            block,
            scoring,
            tiles,
            kind,
        )
    } else {
        first
    };
    Made::<AP> {
        p: joined::<NP, AP>(first.p, second.p, tiles.fragments),
        ds: joined::<NP, AP>(first.ds, second.ds, tiles.fragments),
    }
}

/// P and dS of a fragment.
#[cube]
fn weigh_fragment<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    dp: Vector<f32, NS>,
    seen: &Seen,
    terms: &Terms,
    terms_at: u32,
    block: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: GradientTiles,
    #[comptime] kind: FragmentKind,
) -> Made<NP> {
    let terms = terms_of_block(terms, terms_at, tiles.columns);
    let weights = weights::<F, NB, NS, NP>(
        s,
        &terms,
        block * comptime!(tiles.columns as i32),
        &seen.view,
        &seen.rows,
        scoring,
        tiles.columns,
        comptime!(tiles.sums.has_values()),
        tiles.half,
        kind,
    );
    let ds = if comptime!(tiles.sums.has_dots()) {
        dot_gradients::<NS, NP>(
            weights.w,
            dp,
            &terms,
            seen.view.whole,
            tiles.columns,
            tiles.half,
            kind,
        )
    } else {
        Vector::<u32, NP>::zeroed()
    };
    Made::<NP> { p: weights.p, ds }
}
