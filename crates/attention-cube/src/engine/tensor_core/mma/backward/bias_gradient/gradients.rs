//! Computes P and dS of a warp's scores.

use super::biases::WarpBiases;
use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::bias::add_words;
use crate::engine::tensor_core::common::dropout::{gradient_minus_delta, keep_bits, times_kept};
use crate::engine::tensor_core::common::gradient::{LseDelta, weights};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::backward::part::{WarpLseDelta, WarpSeen};
use crate::engine::tensor_core::mma::fragments::fragment_of;
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use cubecl::prelude::*;

/// Computes P of a warp's scores. An element of P is 0 if its query does not see its key.
#[cube]
pub(super) fn probabilities<F: Float, NB: Size, NS: Size, NP: Size, AS: Size>(
    s: Vector<f32, AS>,
    biases: &WarpBiases,
    seen: &WarpSeen,
    lse_delta: &WarpLseDelta<'_>,
    key_tile: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AS> {
    let mut all = Vector::<f32, AS>::zeroed();
    let first_column = key_tile * comptime!(tiles.columns as i32);
    #[unroll]
    for fragment in 0..tiles.fragments {
        let own_lse_delta = if comptime!(fragment == 0) {
            lse_delta.first
        } else {
            lse_delta.second
        };
        let own_seen = if comptime!(fragment == 0) {
            seen.first
        } else {
            seen.second
        };
        let q_or_k = fragment_of::<AS, NS>(s, fragment);
        let scores = if comptime!(kind.fragment.reads_ahead()) {
            let own_biases = if comptime!(fragment == 0) {
                biases.first
            } else {
                biases.second
            };
            add_words::<NS>(
                q_or_k,
                own_biases,
                &scoring.arguments,
                tiles.columns,
                comptime!(kind.fragment.half_of_bias()),
                kind.fragment,
            )
        } else {
            q_or_k
        };
        // This call needs only `w`, the probabilities before dropout. Keep bits affect only other fields of the result.
        // The call therefore requests keep bits for 0 columns.
        let own_keep = keep_bits::<F, NB>(
            scoring,
            &own_seen.rows,
            first_column,
            0usize,
            kind.fragment.side,
        );
        let own = weights::<F, NB, NS, NP>(
            scores,
            &own_lse_delta,
            first_column,
            &own_seen.block_mask,
            &own_seen.rows,
            scoring,
            &own_keep,
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

/// Adds dS = P ∘ (dP − Δ) to the sums. P holds probabilities before dropout, and dP includes the factor by which dropout
/// multiplies kept probabilities. If P is 0, the function adds nothing, because dP may be NaN or infinite.
///
/// If `skips_missing`, the function also adds nothing for rows past the last query. In a fully visible block, P of such a
/// row is not 0. Without `skips_missing`, the caller must not use the sums of these rows.
#[cube]
pub(super) fn with_gradients<F: Float, NB: Size, NS: Size, AS: Size>(
    sums: Vector<f32, AS>,
    p: Vector<f32, AS>,
    dp: Vector<f32, AS>,
    seen: &WarpSeen,
    lse_delta: &WarpLseDelta<'_>,
    key_tile: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] skips_missing: bool,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AS> {
    let mut sums = sums;
    #[unroll]
    for fragment in 0..tiles.fragments {
        let own_lse_delta = if comptime!(fragment == 0) {
            lse_delta.first
        } else {
            lse_delta.second
        };
        let own_seen = if comptime!(fragment == 0) {
            seen.first
        } else {
            seen.second
        };
        let keep = keep_bits::<F, NB>(
            scoring,
            &own_seen.rows,
            key_tile * comptime!(tiles.columns as i32),
            tiles.columns,
            kind.fragment.side,
        );
        let own_dp = fragment_of::<AS, NS>(dp, fragment);
        #[unroll]
        for i in 0..comptime!(tiles.columns / 2) {
            let register = comptime!(fragment * tiles.vectors()[0] + i);
            let delta = delta_of(&own_lse_delta, i);
            let own = p.extract(register);
            let difference = gradient_minus_delta(
                own_dp.extract(i),
                delta,
                &keep,
                i,
                kind.fragment.score.dropout,
            );
            let ds = times_kept(own * difference, &scoring.dropout);
            let adds_nothing = if comptime!(skips_missing) {
                own == 0.0f32 || is_missing(&own_seen.rows, scoring.masking.seq_lens.q_len, i)
            } else {
                own == 0.0f32
            };
            sums.insert(
                register,
                sums.extract(register) + select(adds_nothing, 0.0f32, ds),
            );
        }
    }
    sums
}

/// True if the row that holds the fragment's `register`-th element lies past the last query.
#[cube]
fn is_missing(rows: &RowPair, q_len: i32, #[comptime] register: usize) -> bool {
    if comptime!(register / 2 % 2 == 1) {
        rows.position_1 >= q_len
    } else {
        rows.position_0 >= q_len
    }
}

/// Returns delta of the row that holds the fragment's `register`-th element.
#[cube]
fn delta_of(lse_delta: &LseDelta<'_>, #[comptime] register: usize) -> f32 {
    if comptime!(register / 2 % 2 == 1) {
        lse_delta.deltas.second
    } else {
        lse_delta.deltas.first
    }
}
