//! P and dS of a warp's part, and how all warps have them.

use super::roles::Roles;
use crate::engine::mma::backward::part::{WarpSeen, WarpTerms};
use crate::engine::mma::fragments::{fragment_of, joined, used_by_warp, used_by_warps};
use crate::engine::mma::plan::GradientSplitDTiles;
use crate::fragment::FragmentKind;
use crate::fragment::gradient::{Terms, Weights, dot_gradients, terms_of_block, weights};
use crate::fragment::scoring::Scoring;
use crate::fragment::stationary::Seen;
use crate::fragment::work_tile::TileKind;
use cube_kit::ampere::product::{pair_address, store_fragments};
use cube_kit::hopper::ptx::store_shared;
use cubecl::prelude::*;

/// Columns of a warp's part.
const PART: usize = GradientSplitDTiles::PART;

/// Weights of a warp's scores in place of its dots, and P where it is multiplied. The terms of the part's queries, where these are the
/// columns, are at `terms_at`.
#[cube]
pub(super) fn weigh<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size>(
    s: Vector<f32, AS>,
    seen: &WarpSeen,
    terms: &WarpTerms<'_>,
    terms_at: u32,
    first_column: i32,
    scoring: &Scoring<F, NB>,
    has_far: bool,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: FragmentKind,
) -> Weights<AS, AP> {
    let first = weigh_fragment::<F, NB, NS, NP>(
        fragment_of::<AS, NS>(s, 0usize),
        &seen.first,
        &terms.first,
        terms_at,
        first_column,
        scoring,
        has_far,
        tiles,
        kind,
    );
    let second = if comptime!(tiles.score_fragments() == 2) {
        weigh_fragment::<F, NB, NS, NP>(
            fragment_of::<AS, NS>(s, 1usize),
            &seen.second,
            &terms.second,
            terms_at,
            first_column,
            scoring,
            has_far,
            tiles,
            kind,
        )
    } else {
        first
    };
    Weights::<AS, AP> {
        w: joined::<f32, NS, AS>(first.w, second.w, tiles.score_fragments()),
        p: joined::<u32, NP, AP>(first.p, second.p, tiles.score_fragments()),
    }
}

#[cube]
fn weigh_fragment<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    seen: &Seen,
    terms: &Terms<'_>,
    terms_at: u32,
    first_column: i32,
    scoring: &Scoring<F, NB>,
    has_far: bool,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: FragmentKind,
) -> Weights<NS, NP> {
    let terms = terms_of_block(terms, terms_at, tiles.columns);
    weights::<F, NB, NS, NP>(
        s,
        &terms,
        first_column,
        &seen.view,
        &seen.rows,
        scoring,
        has_far,
        PART,
        comptime!(tiles.sums.has_values()),
        tiles.half,
        kind,
    )
}

/// dS of a warp's part, from its weights and the gradients of P.
#[cube]
pub(super) fn score_gradients<NS: Size, NP: Size, AS: Size, AP: Size>(
    w: Vector<f32, AS>,
    dp: Vector<f32, AS>,
    seen: &WarpSeen,
    terms: &WarpTerms<'_>,
    terms_at: u32,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: FragmentKind,
) -> Vector<u32, AP> {
    let first = dot_gradients::<NS, NP>(
        fragment_of::<AS, NS>(w, 0usize),
        fragment_of::<AS, NS>(dp, 0usize),
        &terms_of_block(&terms.first, terms_at, tiles.columns),
        seen.first.view.whole,
        PART,
        tiles.half,
        kind,
    );
    let second = if comptime!(tiles.score_fragments() == 2) {
        dot_gradients::<NS, NP>(
            fragment_of::<AS, NS>(w, 1usize),
            fragment_of::<AS, NS>(dp, 1usize),
            &terms_of_block(&terms.second, terms_at, tiles.columns),
            seen.second.view.whole,
            PART,
            tiles.half,
            kind,
        )
    } else {
        first
    };
    joined::<u32, NP, AP>(first, second, tiles.score_fragments())
}

/// Tells all warps a warp's part of what the `gradient`-th gradient is multiplied by.
#[cube]
pub(super) fn share<AP: Size>(
    pairs: Vector<u32, AP>,
    start: u32,
    roles: &Roles,
    #[comptime] gradient: usize,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: TileKind,
) {
    let factors = comptime!((tiles.factors_at() + gradient * tiles.factor_bytes()) as u32);
    store_fragments::<u32, AP>(
        pair_address(
            start + factors,
            roles.score_row,
            roles.part_group,
            tiles.rows,
        ),
        pairs,
        tiles.score_fragments(),
        comptime!(PART / 4),
    );
    if comptime!(kind.leaves_masked()) {
        let used = used_by_warp::<AP>(pairs, PART, tiles.score_fragments());
        let table = comptime!(tiles.used_at() + gradient * GradientSplitDTiles::USED_BYTES);
        let lane = UNIT_POS % 32u32;
        if lane < 4u32 {
            let at = start + comptime!(table as u32) + roles.warp * 16u32;
            store_shared(at + lane * 4u32, used);
        }
    }
}

/// The columns of a block that some row of a warp's gradient uses, of those that this lane multiplies by.
#[cube]
pub(super) fn told_used(start: u32, roles: &Roles, #[comptime] tiles: GradientSplitDTiles) -> u32 {
    let part_groups = comptime!(tiles.part_groups() as u32);
    let first_warp = roles.sum_row / comptime!(tiles.score_rows() as u32) * part_groups;
    let table = start
        + comptime!(tiles.used_at() as u32)
        + roles.gradient * comptime!(GradientSplitDTiles::USED_BYTES as u32);
    used_by_warps(
        table + first_warp * 16u32,
        comptime!(GradientSplitDTiles::SUM_ROWS / tiles.score_rows() * tiles.part_groups()),
        tiles.part_groups(),
    )
}
