//! P and dS of a block.

use super::producer::Places;
use crate::engine::wgmma::plan::GradientSplitMTiles;
use crate::fragment::far::has_far;
use crate::fragment::gradient::{Terms, dot_gradients, terms_of_block, weights};
use crate::fragment::scoring::Scoring;
use crate::fragment::stationary::Seen;
use crate::fragment::work_tile::TileKind;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::wgmma::{free_chunk, take_fragment};
use cubecl::prelude::*;

/// P and dS, as left operands of products; each only where it is needed.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Made<NP: Size> {
    pub p: Vector<u32, NP>,
    pub ds: Vector<u32, NP>,
}

/// The terms of the `count`-th block, which came with its dots.
#[cube]
fn block_terms<'a>(
    row_terms: &Terms<'a>,
    places: &Places,
    count: u32,
    #[comptime] tiles: GradientSplitMTiles,
) -> Terms<'a> {
    let stage = pipeline_state(count, tiles.dot_stages).stage;
    let at = places.terms + stage * comptime!(tiles.term_stride() as u32);
    terms_of_block(row_terms, at, tiles.columns)
}

/// Whether the `count`-th block has far queries. Its dots are there; asked for while products run, the vote takes no time of its own.
#[cube]
pub(super) fn block_has_far(
    row_terms: &Terms<'_>,
    places: &Places,
    count: u32,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
) -> bool {
    let terms = block_terms(row_terms, places, count, tiles);
    has_far(&terms, tiles.columns, kind.fragment)
}

/// Waits for S and dP of the `count`-th block, and makes P and dS of them.
#[cube]
pub(super) fn weigh<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    dp: Vector<f32, NS>,
    seen: &Seen,
    row_terms: &Terms<'_>,
    block: i32,
    scoring: &Scoring<F, NB>,
    places: &Places,
    count: u32,
    elected: u32,
    has_far: bool,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
) -> Made<NP> {
    let used = comptime!(tiles.columns / 2);
    let fragment = comptime!(tiles.fragments()[0]);
    let terms = block_terms(row_terms, places, count, tiles);
    let s = take_fragment::<NS>(
        s,
        used,
        fragment,
        comptime!(usize::from(tiles.sums.has_dots())),
    );
    let weights = weights::<F, NB, NS, NP>(
        s,
        &terms,
        block * comptime!(tiles.columns as i32),
        &seen.view,
        &seen.rows,
        scoring,
        has_far,
        tiles.columns,
        comptime!(tiles.sums.has_values()),
        tiles.half,
        kind.fragment,
    );
    let ds = if comptime!(tiles.sums.has_dots()) {
        let dp = take_fragment::<NS>(dp, used, fragment, 0usize);
        if comptime!(!tiles.sums.has_values()) {
            let stage = pipeline_state(count, tiles.value_stages).stage;
            free_chunk(places.value_empty + 8u32 * stage, elected, 0usize, 1usize);
        }
        dot_gradients::<NS, NP>(
            weights.w,
            dp,
            &terms,
            seen.view.whole,
            tiles.columns,
            tiles.half,
            kind.fragment,
        )
    } else {
        // The terms in it are read, too: P is made of them.
        let stage = pipeline_state(count, tiles.dot_stages).stage;
        free_chunk(places.dot_empty + 8u32 * stage, elected, 0usize, 1usize);
        Vector::<u32, NP>::zeroed()
    };
    Made::<NP> { p: weights.p, ds }
}
