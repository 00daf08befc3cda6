//! P and dS of a warp's scores.

use crate::engine::mma::backward::part::{WarpSeen, WarpTerms};
use crate::engine::mma::fragments::fragment_of;
use crate::engine::mma::plan::BiasGradientTiles;
use crate::fragment::gradient::{Terms, weights};
use crate::fragment::scoring::Scoring;
use crate::fragment::work_tile::TileKind;
use cubecl::prelude::*;

/// P of a warp's scores, 0 where a query does not see a key.
#[cube]
pub(super) fn probabilities<F: Float, NB: Size, NS: Size, NP: Size, AS: Size>(
    s: Vector<f32, AS>,
    seen: &WarpSeen,
    terms: &WarpTerms<'_>,
    key_tile: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AS> {
    let mut all = Vector::<f32, AS>::zeroed();
    let first_column = key_tile * comptime!(tiles.columns as i32);
    #[unroll]
    for fragment in 0..tiles.fragments {
        let own_terms = if comptime!(fragment == 0) {
            terms.first
        } else {
            terms.second
        };
        let own_seen = if comptime!(fragment == 0) {
            seen.first
        } else {
            seen.second
        };
        let own = weights::<F, NB, NS, NP>(
            fragment_of::<AS, NS>(s, fragment),
            &own_terms,
            first_column,
            &own_seen.view,
            &own_seen.rows,
            scoring,
            // With a bias, a query has its logsumexp in two numbers.
            false,
            tiles.columns,
            false,
            tiles.half,
            kind.fragment,
        );
        let count = own.w.vector_size();
        #[unroll]
        for i in 0..count {
            all.insert(comptime!(fragment * count + i), own.w.extract(i));
        }
    }
    all
}

/// The sums with P ∘ (dP − Δ). dP may be NaN or infinite where P is 0.
#[cube]
pub(super) fn with_gradients<AS: Size>(
    sums: Vector<f32, AS>,
    p: Vector<f32, AS>,
    dp: Vector<f32, AS>,
    terms: &WarpTerms<'_>,
    #[comptime] tiles: BiasGradientTiles,
) -> Vector<f32, AS> {
    let mut sums = sums;
    #[unroll]
    for fragment in 0..tiles.fragments {
        let own_terms = if comptime!(fragment == 0) {
            terms.first
        } else {
            terms.second
        };
        #[unroll]
        for i in 0..comptime!(tiles.columns / 2) {
            let register = comptime!(fragment * tiles.vectors()[0] + i);
            let delta = delta_of(&own_terms, i);
            let own = p.extract(register);
            let ds = own * (dp.extract(register) - delta);
            sums.insert(
                register,
                sums.extract(register) + select(own == 0.0f32, 0.0f32, ds),
            );
        }
    }
    sums
}

/// Delta of a fragment's `register`-th number.
#[cube]
fn delta_of(terms: &Terms<'_>, #[comptime] register: usize) -> f32 {
    if comptime!(register / 2 % 2 == 1) {
        terms.deltas.second
    } else {
        terms.deltas.first
    }
}
