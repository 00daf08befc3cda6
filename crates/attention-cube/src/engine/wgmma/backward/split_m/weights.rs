//! P and dS of a block.

use super::producer::Places;
use crate::engine::wgmma::plan::GradientSplitMTiles;
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

/// Waits for S and dP of the `count`-th block, and makes P and dS of them.
#[cube]
pub(super) fn weigh<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    dp: Vector<f32, NS>,
    seen: &Seen,
    row_terms: &Terms,
    block: i32,
    scoring: &Scoring<F, NB>,
    places: &Places,
    count: u32,
    elected: u32,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
) -> Made<NP> {
    let used = comptime!(tiles.columns / 2);
    let fragment = comptime!(tiles.fragments()[0]);
    let s = take_fragment::<NS>(
        s,
        used,
        fragment,
        comptime!(usize::from(tiles.sums.has_dots())),
    );
    let dot_stage = pipeline_state(count, tiles.dot_stages).stage;
    let at = places.terms + dot_stage * comptime!(tiles.term_stride() as u32);
    let terms = terms_of_block(row_terms, at, tiles.columns);
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
