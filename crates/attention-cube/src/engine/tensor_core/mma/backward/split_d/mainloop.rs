//! The main loop of a CTA over the blocks that its tile sees. A tile of queries streams blocks of keys, and a tile of
//! keys streams blocks of queries.
//!
//! Each iteration handles one block. Chunks of the operands of S, dP and the gradient GEMM pass through a ring of slots in
//! shared memory.

use super::p_ds::{compute_p_ds, load_used_keys, score_gradients, share};
use super::ring::{GradientStep, Operands, fill, lse_delta_offset};
use super::warp_roles::Roles;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::stationary_tile::{Stationary, Visit, visit_from};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::backward::part::{Part, lse_delta_of_warp, seen_by_warp};
use crate::engine::tensor_core::mma::plan::MmaGradientSplitDTiles;
use crate::engine::tensor_core::mma::ring::{
    RingSlot, RingTurn, await_full, ring_slot_of, signal_empty, turn_after,
};
use cube_kit::ampere::mma::{
    Scores, SharedSums, add_scores, add_shared_product, left_address, right_address, scores,
    turn_address,
};
use cube_kit::nvidia::{ROW_BYTES, SUBTILE};
use cubecl::prelude::*;

/// The number of score columns that each warp computes for a block.
const PART: usize = MmaGradientSplitDTiles::PART;

/// Computes the warp's rows and columns of the gradient, as a sum over all blocks that the tile sees. `first` is the
/// first of these blocks. Before the call, the caller must start the copies of the operands that stay in shared memory.
#[cube]
pub(super) fn sum<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size, AG: Size>(
    operands: &Operands,
    lse_delta: &Tensor<f32>,
    tile: &Stationary,
    first: Visit,
    roles: &Roles,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: MmaGradientSplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AG> {
    let masking = &scoring.masking;
    let start = operands.start;
    let row = (roles.score_row + UNIT_POS % 32u32 / 4u32) as i32;
    let first_word = roles.part_group * comptime!((PART / 32) as u32);
    let part = comptime!(Part {
        fragments: tiles.score_fragments(),
        columns: PART,
        block: tiles.columns,
    });
    let row_lse_delta =
        lse_delta_of_warp(lse_delta, tile, row, &masking.seq_lens, part, kind.fragment);
    let lanes = lanes(roles, start, tiles);
    let mut sums = Vector::<f32, AG>::zeroed();
    let mut head = first.head;
    let mut block = first.block;
    let mut slot = 0u32;
    let mut parity = 0u32;
    let mut stage = 0u32;
    if head < tile.heads {
        let pass = GradientStep {
            visit: first,
            next: first,
            first: RingTurn { slot, parity },
            stage,
        };
        #[unroll]
        for chunk in 0..comptime!(tiles.slots - 1) {
            fill(operands, lse_delta, tile, &pass, chunk, tiles);
        }
    }
    while head < tile.heads {
        let pass = GradientStep {
            visit: Visit { head, block },
            next: visit_from(tile, head, block + 1i32, masking, kind),
            first: RingTurn { slot, parity },
            stage,
        };
        let seen = seen_by_warp::<F, NB>(tile, row, head, block, first_word, scoring, part, kind);
        let lse_delta_at = lse_delta_offset(operands, stage, tiles)
            + roles.part_group * comptime!(4 * PART as u32);
        let mut s = Vector::<f32, AS>::zeroed();
        #[unroll]
        for chunk in 0..tiles.dot_chunks() {
            let place = await_chunk(operands, &pass, chunk, tiles);
            s = scores_of_chunk::<AS>(s, &place, &lanes, false, chunk, tiles);
            leave_chunk(operands, lse_delta, tile, &pass, &place, chunk, tiles);
        }
        let first_column = block * comptime!(tiles.columns as i32)
            + (roles.part_group * comptime!(PART as u32)) as i32;
        let weighed = compute_p_ds::<F, NB, NS, NP, AS, AP>(
            s,
            &seen,
            &row_lse_delta,
            lse_delta_at,
            first_column,
            scoring,
            tiles,
            kind.fragment,
        );
        // No barrier is needed before this warp overwrites P and dS of the previous block. This warp has already refilled the
        // shared-memory slot of the previous block's last chunk. The refill waits until all warps have multiplied P or dS by
        // that chunk, so all warps have read P and dS.
        if comptime!(tiles.sums.has_values()) {
            share::<AP>(
                weighed.p,
                start,
                roles,
                comptime!(tiles.gradients() - 1),
                tiles,
                kind,
            );
        }
        if comptime!(tiles.sums.has_q_or_k()) {
            let mut dp = Vector::<f32, AS>::zeroed();
            #[unroll]
            for chunk in 0..tiles.value_chunks() {
                let index = comptime!(tiles.dot_chunks() + chunk);
                let place = await_chunk(operands, &pass, index, tiles);
                dp = scores_of_chunk::<AS>(dp, &place, &lanes, true, chunk, tiles);
                leave_chunk(operands, lse_delta, tile, &pass, &place, index, tiles);
            }
            let ds = score_gradients::<F, NB, NS, NP, AS, AP>(
                weighed.w,
                dp,
                &seen,
                &row_lse_delta,
                lse_delta_at,
                first_column,
                scoring,
                tiles,
                kind.fragment,
            );
            share::<AP>(ds, start, roles, 0usize, tiles, kind);
        }
        sync_cube();
        let may_have_masked = seen.first.block_mask.may_have_masked;
        let used = if comptime!(kind.leaves_masked()) {
            load_used_keys(start, roles, tiles)
        } else {
            0u32.runtime()
        };
        #[unroll]
        for chunk in 0..tiles.sum_chunks() {
            let index = comptime!(tiles.dot_chunks() + tiles.value_chunks() + chunk);
            let place = await_chunk(operands, &pass, index, tiles);
            sums = with_chunk::<AG>(
                sums,
                &place,
                &lanes,
                may_have_masked,
                used,
                chunk,
                tiles,
                kind,
            );
            leave_chunk(operands, lse_delta, tile, &pass, &place, index, tiles);
        }
        let turn = turn_after(
            &pass.first,
            comptime!(tiles.chunks()),
            comptime!(tiles.ring()),
        );
        head = pass.next.head;
        block = pass.next.block;
        slot = turn.slot;
        parity = turn.parity;
        stage ^= 1u32;
    }
    sums
}

/// The places in shared memory from which a lane loads the operands of the GEMMs. `start` and `sum_left` are addresses.
/// `score_left`, `score_right` and `sum_right` are offsets from the start of a chunk. A chunk of the streamed operands
/// lies in a slot of the ring. A chunk of the tile lies in a slot too, or in the shared memory that holds the tile
/// during the main loop.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Lanes {
    start: u32,
    /// The offset in a chunk of the tile's columns from which the lane loads the left operand of the GEMMs of S and dP.
    /// The lane's first row of this operand lies there.
    score_left: u32,
    /// The offset in a chunk of the block's columns from which the lane loads the right operand of the GEMMs of S and
    /// dP. The lane's first row of this operand lies there. The chunk starts at the start of its ring slot.
    score_right: u32,
    /// The absolute address from which the lane loads P or dS, the left operand of the gradient GEMM.
    sum_left: u32,
    sum_right: u32,
}

#[cube]
fn lanes(roles: &Roles, start: u32, #[comptime] tiles: MmaGradientSplitDTiles) -> Lanes {
    let factors = start
        + comptime!(tiles.factors_at() as u32)
        + roles.gradient * comptime!(tiles.factor_bytes() as u32);
    Lanes {
        start,
        score_left: left_address(0u32, roles.score_row),
        score_right: right_address(roles.part_group * comptime!((PART * ROW_BYTES) as u32)),
        sum_left: left_address(factors, roles.sum_row),
        sum_right: turn_address(
            roles.gradient * comptime!(tiles.sum_bytes() as u32),
            roles.column_group,
            tiles.sum_rows,
        ),
    }
}

/// Waits until the copies of the `chunk`-th chunk have completed, and returns the shared-memory slot that holds the chunk.
#[cube]
fn await_chunk(
    operands: &Operands,
    pass: &GradientStep,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaGradientSplitDTiles,
) -> RingSlot {
    let place = ring_slot_of(operands.start, &pass.first, chunk, comptime!(tiles.ring()));
    await_full(&place);
    place
}

/// Signals that this warp has read the `chunk`-th chunk. Then waits until all warps have read the preceding chunk, and
/// refills the slot of the preceding chunk. The function seldom waits, because all warps have usually read the
/// preceding chunk by then.
#[cube]
fn leave_chunk(
    operands: &Operands,
    lse_delta: &Tensor<f32>,
    tile: &Stationary,
    pass: &GradientStep,
    place: &RingSlot,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaGradientSplitDTiles,
) {
    signal_empty(place);
    fill(
        operands,
        lse_delta,
        tile,
        pass,
        comptime!(chunk + tiles.slots - 1),
        tiles,
    );
}

/// Multiplies one chunk of the tile's columns by the matching chunk of the block's columns, and adds the product to
/// `s`. If `v_or_do`, `s` is dP, else `s` is S.
#[cube]
fn scores_of_chunk<AS: Size>(
    s: Vector<f32, AS>,
    place: &RingSlot,
    lanes: &Lanes,
    #[comptime] v_or_do: bool,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaGradientSplitDTiles,
) -> Vector<f32, AS> {
    let left = if comptime!(tiles.holds(v_or_do)) {
        lanes.start + comptime!(stationary_at(tiles, v_or_do, chunk) as u32)
    } else {
        place.slot + comptime!(tiles.tile_rows_at() as u32)
    };
    let left = left + lanes.score_left;
    let right = place.slot + lanes.score_right;
    let product = comptime!(Scores {
        fragments: tiles.score_fragments(),
        columns: PART,
        depth: tiles.chunk_columns(
            match v_or_do {
                true => tiles.value_dim,
                false => tiles.head_dim,
            },
            chunk
        ),
        left_rows: tiles.rows,
        right_rows: tiles.columns,
        half: tiles.half,
    });
    if comptime!(chunk == 0) {
        scores::<AS>(left, right, product)
    } else {
        add_scores::<AS>(s, left, right, product)
    }
}

/// Returns the byte offset in shared memory of the tile's columns that belong to the `chunk`-th chunk of a block. The
/// GEMM of S or dP multiplies these columns by the chunk. The columns stay in shared memory during the main loop.
const fn stationary_at(tiles: MmaGradientSplitDTiles, v_or_do: bool, chunk: usize) -> usize {
    let first = match v_or_do {
        true => tiles.stationary_values_at(),
        false => 0,
    };
    first + chunk * tiles.score_columns / SUBTILE * tiles.rows * ROW_BYTES
}

/// Runs the gradient GEMM over one chunk of a block's rows, and adds the product to `sums`. Block rows that are hidden
/// from the whole tile may be NaN, so the GEMM reads these rows as zeros.
#[cube]
fn with_chunk<AG: Size>(
    sums: Vector<f32, AG>,
    place: &RingSlot,
    lanes: &Lanes,
    may_have_masked: bool,
    used: u32,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaGradientSplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AG> {
    let left = lanes.sum_left;
    let right = place.slot + lanes.sum_right;
    let plain = comptime!(sum_product(tiles, chunk, false));
    let mut sums = sums;
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            let masked = comptime!(sum_product(tiles, chunk, true));
            sums = add_shared_product::<AG>(sums, left, right, used, masked);
        } else {
            sums = add_shared_product::<AG>(sums, left, right, 0u32, plain);
        }
    } else {
        sums = add_shared_product::<AG>(sums, left, right, 0u32, plain);
    }
    sums
}

/// The sizes of the gradient GEMM over one chunk of a block's rows.
const fn sum_product(tiles: MmaGradientSplitDTiles, chunk: usize, masked: bool) -> SharedSums {
    SharedSums {
        fragments: MmaGradientSplitDTiles::SUM_FRAGMENTS,
        steps: tiles.steps(),
        first_step: 0,
        added_steps: tiles.steps(),
        groups: tiles.column_groups(),
        first_depth: chunk * tiles.sum_rows,
        depth: tiles.sum_rows,
        left_rows: tiles.rows,
        right_rows: tiles.sum_rows,
        masked,
        half: tiles.half,
    }
}
