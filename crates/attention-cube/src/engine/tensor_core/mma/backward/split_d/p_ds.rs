//! Computes P and dS for a warp's scores, and stores P and dS in shared memory for all warps.

use super::warp_roles::Roles;
use crate::engine::tensor_core::common::FragmentKind;
use crate::engine::tensor_core::common::dropout::keep_bits;
use crate::engine::tensor_core::common::gradient::{
    LseDelta, PAndDs, dot_gradients, lse_delta_of_block, weights,
};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::stationary_tile::Seen;
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::backward::part::{WarpLseDelta, WarpSeen};
use crate::engine::tensor_core::mma::fragments::{
    fragment_of, joined, used_by_warp, used_by_warps,
};
use crate::engine::tensor_core::mma::plan::MmaGradientSplitDTiles;
use cube_kit::ampere::mma::{pair_address, store_fragments};
use cube_kit::nvidia::ptx::store_shared;
use cubecl::prelude::*;

/// The number of score columns that each warp computes for a block.
const PART: usize = MmaGradientSplitDTiles::PART;

/// Computes `w` (P times the slope of the softcap) from a warp's scores. If the kernel computes the gradient of V, the
/// function also computes P. If the score columns are queries, the LSE and delta of these queries are in shared memory
/// at `lse_delta_at`.
#[cube]
pub(super) fn compute_p_ds<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size>(
    s: Vector<f32, AS>,
    seen: &WarpSeen,
    lse_delta: &WarpLseDelta<'_>,
    lse_delta_at: u32,
    first_column: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: MmaGradientSplitDTiles,
    #[comptime] kind: FragmentKind,
) -> PAndDs<AS, AP> {
    let first = weigh_fragment::<F, NB, NS, NP>(
        fragment_of::<AS, NS>(s, 0usize),
        &seen.first,
        &lse_delta.first,
        lse_delta_at,
        first_column,
        scoring,
        tiles,
        kind,
    );
    let second = if comptime!(tiles.score_fragments() == 2) {
        weigh_fragment::<F, NB, NS, NP>(
            fragment_of::<AS, NS>(s, 1usize),
            &seen.second,
            &lse_delta.second,
            lse_delta_at,
            first_column,
            scoring,
            tiles,
            kind,
        )
    } else {
        first
    };
    PAndDs::<AS, AP> {
        w: joined::<f32, NS, AS>(first.w, second.w, tiles.score_fragments()),
        p: joined::<u32, NP, AP>(first.p, second.p, tiles.score_fragments()),
    }
}

#[cube]
fn weigh_fragment<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    seen: &Seen,
    lse_delta: &LseDelta<'_>,
    lse_delta_at: u32,
    first_column: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: MmaGradientSplitDTiles,
    #[comptime] kind: FragmentKind,
) -> PAndDs<NS, NP> {
    let lse_delta = lse_delta_of_block(lse_delta, lse_delta_at, tiles.columns);
    let keep = keep_bits::<F, NB>(scoring, &seen.rows, first_column, PART, kind.side);
    weights::<F, NB, NS, NP>(
        s,
        &lse_delta,
        first_column,
        &seen.block_mask,
        &seen.rows,
        scoring,
        &keep,
        PART,
        comptime!(tiles.sums.has_values()),
        tiles.half,
        kind,
    )
}

/// Computes a warp's dS from `w` (P times the slope of the softcap) and dP.
#[cube]
pub(super) fn score_gradients<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size>(
    w: Vector<f32, AS>,
    dp: Vector<f32, AS>,
    seen: &WarpSeen,
    lse_delta: &WarpLseDelta<'_>,
    lse_delta_at: u32,
    first_column: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: MmaGradientSplitDTiles,
    #[comptime] kind: FragmentKind,
) -> Vector<u32, AP> {
    let first = dot_gradients::<NS, NP>(
        fragment_of::<AS, NS>(w, 0usize),
        fragment_of::<AS, NS>(dp, 0usize),
        &lse_delta_of_block(&lse_delta.first, lse_delta_at, tiles.columns),
        &keep_bits::<F, NB>(scoring, &seen.first.rows, first_column, PART, kind.side),
        &seen.first.block_mask,
        PART,
        tiles.half,
        kind,
    );
    let second = if comptime!(tiles.score_fragments() == 2) {
        dot_gradients::<NS, NP>(
            fragment_of::<AS, NS>(w, 1usize),
            fragment_of::<AS, NS>(dp, 1usize),
            &lse_delta_of_block(&lse_delta.second, lse_delta_at, tiles.columns),
            &keep_bits::<F, NB>(scoring, &seen.second.rows, first_column, PART, kind.side),
            &seen.second.block_mask,
            PART,
            tiles.half,
            kind,
        )
    } else {
        first
    };
    joined::<u32, NP, AP>(first, second, tiles.score_fragments())
}

/// Stores a warp's P or dS in shared memory, where all warps read it as the left operand of a gradient GEMM. `gradient`
/// is the index of the gradient that this GEMM computes. If the kernel computes dK and dV, the index is 0 for dK and 1
/// for dV. Else the index is 0.
#[cube]
pub(super) fn share<AP: Size>(
    pairs: Vector<u32, AP>,
    start: u32,
    roles: &Roles,
    #[comptime] gradient: usize,
    #[comptime] tiles: MmaGradientSplitDTiles,
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
        let table = comptime!(tiles.used_at() + gradient * MmaGradientSplitDTiles::USED_BYTES);
        let lane = UNIT_POS % 32u32;
        if lane < 4u32 {
            let at = start + comptime!(table as u32) + roles.warp * 16u32;
            store_shared(at + lane * 4u32, used);
        }
    }
}

/// Loads the *used bits* of P or dS, the left operand of the gradient GEMM. The lane multiplies some of this operand's
/// columns, and the result has one bit for each of them. A bit is set if the column has a nonzero element in one of the
/// warp's gradient rows.
#[cube]
pub(super) fn load_used_keys(
    start: u32,
    roles: &Roles,
    #[comptime] tiles: MmaGradientSplitDTiles,
) -> u32 {
    let part_groups = comptime!(tiles.part_groups() as u32);
    let first_warp = roles.sum_row / comptime!(tiles.score_rows() as u32) * part_groups;
    let table = start
        + comptime!(tiles.used_at() as u32)
        + roles.gradient * comptime!(MmaGradientSplitDTiles::USED_BYTES as u32);
    used_by_warps(
        table + first_warp * 16u32,
        comptime!(MmaGradientSplitDTiles::SUM_ROWS / tiles.score_rows() * tiles.part_groups()),
        tiles.part_groups(),
    )
}
