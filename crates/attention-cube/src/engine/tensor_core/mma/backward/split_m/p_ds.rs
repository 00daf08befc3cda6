//! Computes P and dS of a warp's fragments.

use crate::engine::tensor_core::common::FragmentKind;
use crate::engine::tensor_core::common::dropout::keep_bits;
use crate::engine::tensor_core::common::gradient::{
    LseDelta, dot_gradients, lse_delta_of_block, weights,
};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::stationary_tile::Seen;
use crate::engine::tensor_core::mma::backward::part::{WarpLseDelta, WarpSeen};
use crate::engine::tensor_core::mma::fragments::{fragment_of, joined};
use crate::engine::tensor_core::mma::plan::MmaGradientSplitMTiles;
use cubecl::prelude::*;

/// P and dS of a warp's rows, packed as left operands of `mma`. P is computed only for dV, and dS only for dQ or dK.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Made<AP: Size> {
    pub p: Vector<u32, AP>,
    pub ds: Vector<u32, AP>,
}

/// Computes P and dS from S and dP of a block. If the score columns are queries, the LSE and delta of these queries are
/// in shared memory at `lse_delta_at`.
#[cube]
pub(super) fn compute_p_ds<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size>(
    s: Vector<f32, AS>,
    dp: Vector<f32, AS>,
    seen: &WarpSeen,
    lse_delta: &WarpLseDelta<'_>,
    lse_delta_at: u32,
    block: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: MmaGradientSplitMTiles,
    #[comptime] kind: FragmentKind,
) -> Made<AP> {
    let first = weigh_fragment::<F, NB, NS, NP>(
        fragment_of::<AS, NS>(s, 0usize),
        fragment_of::<AS, NS>(dp, 0usize),
        &seen.first,
        &lse_delta.first,
        lse_delta_at,
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
            &lse_delta.second,
            lse_delta_at,
            block,
            scoring,
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

/// Computes P and dS of one fragment.
#[cube]
fn weigh_fragment<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    dp: Vector<f32, NS>,
    seen: &Seen,
    lse_delta: &LseDelta<'_>,
    lse_delta_at: u32,
    block: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: MmaGradientSplitMTiles,
    #[comptime] kind: FragmentKind,
) -> Made<NP> {
    let lse_delta = lse_delta_of_block(lse_delta, lse_delta_at, tiles.columns);
    let first_column = block * comptime!(tiles.columns as i32);
    let keep = keep_bits::<F, NB>(scoring, &seen.rows, first_column, tiles.columns, kind.side);
    let weights = weights::<F, NB, NS, NP>(
        s,
        &lse_delta,
        first_column,
        &seen.block_mask,
        &seen.rows,
        scoring,
        &keep,
        tiles.columns,
        comptime!(tiles.sums.has_values()),
        tiles.half,
        kind,
    );
    let ds = if comptime!(tiles.sums.has_q_or_k()) {
        dot_gradients::<NS, NP>(
            weights.w,
            dp,
            &lse_delta,
            &keep,
            &seen.block_mask,
            tiles.columns,
            tiles.half,
            kind,
        )
    } else {
        Vector::<u32, NP>::zeroed()
    };
    Made::<NP> { p: weights.p, ds }
}
