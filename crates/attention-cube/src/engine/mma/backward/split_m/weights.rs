//! P and dS of a warp's fragments.

use crate::engine::mma::backward::part::{WarpSeen, WarpTerms};
use crate::engine::mma::fragments::{fragment_of, joined};
use crate::engine::mma::plan::GradientSplitMTiles;
use crate::fragment::FragmentKind;
use crate::fragment::gradient::{Terms, dot_gradients, terms_of_block, weights};
use crate::fragment::scoring::Scoring;
use crate::fragment::stationary::Seen;
use cubecl::prelude::*;

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
    terms: &WarpTerms<'_>,
    terms_at: u32,
    block: i32,
    scoring: &Scoring<F, NB>,
    has_far: bool,
    #[comptime] tiles: GradientSplitMTiles,
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
        has_far,
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
            has_far,
            tiles,
            kind,
        )
    } else {
        first
    };
    Made::<AP> {
        p: joined::<u32, NP, AP>(first.p, second.p, tiles.fragments),
        ds: joined::<u32, NP, AP>(first.ds, second.ds, tiles.fragments),
    }
}

/// P and dS of a fragment.
#[cube]
fn weigh_fragment<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    dp: Vector<f32, NS>,
    seen: &Seen,
    terms: &Terms<'_>,
    terms_at: u32,
    block: i32,
    scoring: &Scoring<F, NB>,
    has_far: bool,
    #[comptime] tiles: GradientSplitMTiles,
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
        has_far,
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
            // The same question as that of the weights, so that both are asked at once.
            seen.view.whole && !has_far,
            tiles.columns,
            tiles.half,
            kind,
        )
    } else {
        Vector::<u32, NP>::zeroed()
    };
    Made::<NP> { p: weights.p, ds }
}
