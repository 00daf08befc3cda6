//! The online softmax of a block in the split-D forward. Each warpgroup computes P for half of the block's keys. The
//! warpgroups exchange their row maxima.

use super::producer::SharedOffsets;
use super::warpgroups::{CONSUMERS, HALF_KEYS, MAXIMA};
use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::dropout::{draw_step, packed_step};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::softmax::{
    SoftmaxState, exp_scores, quad_max, rescaled, softmax_state, thread_row_max,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::chunked_gemm::Ring;
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitDTiles;
use crate::engine::tensor_core::wgmma::zero_fill::signal_used_keys;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{async_proxy_fence, barrier_arrive, barrier_wait, store_matrices};
use cube_kit::hopper::wgmma::{descriptor, free_chunk, matrix_row};
use cube_kit::nvidia::accumulator::{Pair, pair};
use cube_kit::nvidia::ptx::{load_shared, named_barrier, store_shared, uniform};
use cubecl::prelude::*;

/// Returns the shared memory descriptor of P for the `count`-th block that the CTA processes.
#[cube]
pub(super) fn probabilities(offsets: &SharedOffsets, count: u32) -> u32 {
    uniform(descriptor(
        offsets.probabilities + count % 2u32 * comptime!(2 * WgmmaSplitDTiles::HALF_BYTES as u32),
    ))
}

/// Waits until at most `pending` wgmma groups are in flight. The GEMM of the warpgroup's `own`-th chunk of V is then
/// complete, and the function frees that chunk. `from` is the number of the warpgroup's first chunk of V, counted over
/// all chunks of K and V that pass through the ring.
#[cube]
pub(super) fn free_values(
    empty: u32,
    ring: Ring,
    from: u32,
    #[comptime] own: usize,
    #[comptime] pending: usize,
    #[comptime] tiles: WgmmaSplitDTiles,
) {
    let chunk = pipeline_state(
        from + comptime!((WgmmaSplitDTiles::WARPGROUPS * own) as u32),
        tiles.stages,
    );
    free_chunk(
        empty + 8u32 * chunk.stage,
        ring.elected,
        pending,
        WgmmaSplitDTiles::WARPGROUPS,
    );
}

/// Makes the second warpgroup wait for the first chunk of V of a block, and arrive at that chunk's empty barrier. This
/// happens only if a block has more chunks of V than the ring has stages.
///
/// In that case, the first and the last chunk of V of the block use the same stage. Without this wait, the second
/// warpgroup would skip one phase of the stage's full barrier. The phases before and after the skipped phase have the
/// same parity, so the wait for the last chunk could succeed too early.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(super) fn share_first_chunk(ring: Ring, values: u32, #[comptime] tiles: WgmmaSplitDTiles) {
    if comptime!(tiles.frees_first_chunk_at_once()) {
        if UNIT_POS >= comptime!(WARPGROUP as u32) {
            let chunk = pipeline_state(values, tiles.stages);
            barrier_wait(ring.full + 8u32 * chunk.stage, chunk.parity);
            barrier_arrive(ring.empty + 8u32 * chunk.stage, ring.elected);
        }
    }
}

/// Makes each warp of the second warpgroup arrive a second time at the empty barrier of the warpgroup's first chunk of
/// V. The function does this in the same case as [`share_first_chunk`]. The barrier expects eight arrivals. Only the
/// four warps of the second warpgroup arrive there, so each must arrive twice.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(super) fn free_own_first_chunk(ring: Ring, values: u32, #[comptime] tiles: WgmmaSplitDTiles) {
    if comptime!(tiles.frees_first_chunk_at_once()) {
        if UNIT_POS >= comptime!(WARPGROUP as u32) {
            let chunk = pipeline_state(values + 1u32, tiles.stages);
            barrier_arrive(ring.empty + 8u32 * chunk.stage, ring.elected);
        }
    }
}

/// Exchanges one f32 for each of the thread's two rows with the other warpgroup. If `largest`, the function returns for
/// each row the maximum of the two warpgroups' values, else the sum of these values. `buffer` is the index of one of
/// two exchange buffers in shared memory. Before the call, the previous exchange through this buffer must be complete.
#[cube]
pub(super) fn exchange(
    offsets: &SharedOffsets,
    own: Pair,
    buffer: u32,
    #[comptime] largest: bool,
) -> Pair {
    let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
    let lane = UNIT_POS % 32u32;
    let row = UNIT_POS / 32u32 % 4u32 * 16u32 + lane / 4u32;
    let of_warpgroup = comptime!(4 * WgmmaSplitDTiles::ROWS as u32);
    let start = offsets.exchange + buffer * 2u32 * of_warpgroup + 4u32 * row;
    let column = lane % 4u32;
    if column == 0u32 {
        let mine = start + warpgroup * of_warpgroup;
        store_shared(mine, u32::reinterpret(own.first));
        store_shared(mine + 32u32, u32::reinterpret(own.second));
    }
    named_barrier(MAXIMA, CONSUMERS);
    let other = start + (1u32 - warpgroup) * of_warpgroup;
    let first = f32::reinterpret(load_shared(other));
    let second = f32::reinterpret(load_shared(other + 32u32));
    if comptime!(largest) {
        Pair {
            first: max(own.first, first),
            second: max(own.second, second),
        }
    } else {
        Pair {
            first: own.first + first,
            second: own.second + second,
        }
    }
}

/// Computes P of the `count`-th block for the warpgroup's half of the keys, and stores this half of P to shared memory.
///
/// If `busy`, the tensor cores run `P V` of the previous block at the same time. The function then also frees those
/// chunks of V that this GEMM has read, except the last chunk, which the caller frees. `values` is the number of the
/// warpgroup's first chunk of V.
#[cube]
pub(super) fn softmax<F: Float, NB: Size, NS: Size>(
    s: Vector<f32, NS>,
    first_column: i32,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    before: SoftmaxState,
    scale_log2: f32,
    offsets: &SharedOffsets,
    ring: Ring,
    values: u32,
    count: u32,
    #[comptime] busy: bool,
    #[comptime] tiles: WgmmaSplitDTiles,
    #[comptime] kind: TileKind,
) -> SoftmaxState {
    let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
    let own = quad_max(thread_row_max::<NS>(s, before.row_max.reference, HALF_KEYS));
    let largest = exchange(offsets, own, count % 2u32, true);
    if comptime!(busy && !tiles.frees_first_chunk_at_once()) {
        free_values(offsets.empty, ring, values, 0usize, 3usize, tiles);
    }
    let made = rescaled::<NS>(
        s,
        largest,
        before.row_max,
        scale_log2,
        scoring.arguments.negative_infinity,
        true,
        HALF_KEYS,
    );
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    let mut used = 0u32;
    let half = offsets.probabilities
        + (count % 2u32 * 2u32 + warpgroup) * comptime!(WgmmaSplitDTiles::HALF_BYTES as u32);
    #[unroll]
    for step in 0..comptime!(HALF_KEYS / 16) {
        let part = exp_scores::<NS>(
            made.s,
            made.row_max.shift,
            scale_log2,
            step,
            comptime!(kind.leaves_masked()),
        );
        let words = draw_step::<F, NB>(
            scoring,
            rows,
            first_column + comptime!(16 * step as i32),
            comptime!(kind.heads == 1),
        );
        let p = packed_step::<F, NB>(
            part.values,
            words,
            scoring,
            comptime!(kind.heads == 1),
            tiles.half,
        );
        store_matrices(
            matrix_row(half, step),
            p.extract(0usize),
            p.extract(1usize),
            p.extract(2usize),
            p.extract(3usize),
        );
        sum_0 += part.sums.first;
        sum_1 += part.sums.second;
        used |= part.used;
        if comptime!(busy && step == 1) {
            free_values(offsets.empty, ring, values, 1usize, 2usize, tiles);
        }
    }
    if comptime!(kind.leaves_masked()) {
        signal_used_keys(
            offsets.used,
            used,
            warpgroup * comptime!((HALF_KEYS / 4) as u32),
            count,
        );
    }
    async_proxy_fence();
    if comptime!(busy) {
        free_values(offsets.empty, ring, values, 2usize, 1usize, tiles);
    }
    softmax_state::<NS>(made, before.sums, pair(sum_0, sum_1))
}
