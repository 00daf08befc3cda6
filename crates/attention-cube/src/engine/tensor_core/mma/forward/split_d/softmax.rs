//! Computes P of a block. Several warps compute the scores of the same rows with different keys, so these warps
//! exchange row maxima through shared memory.

use super::shared_offsets::SharedOffsets;
use super::warp_roles::Roles;
use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::dropout::{draw_step, packed_step};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::softmax::{
    SoftmaxState, exp_scores, quad_max, rescaled, softmax_state, thread_row_max,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::fragments::{load_row_pair, store_row_pair, used_by_warps};
use crate::engine::tensor_core::mma::plan::split_d::MmaSplitDTiles;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::mma::{pair_address, store_fragments};
use cube_kit::nvidia::accumulator::{Pair, pair};
use cube_kit::nvidia::ptx::store_shared;
use cubecl::prelude::*;

/// Extracts the registers of one of the warp's score fragments.
#[cube]
pub(super) fn score_fragment<AS: Size, NS: Size>(
    s: Vector<f32, AS>,
    #[comptime] fragment: usize,
) -> Vector<f32, NS> {
    let mut own = Vector::<f32, NS>::zeroed();
    #[unroll]
    for i in 0..MmaSplitDTiles::SCORE_REGISTERS {
        own.insert(
            i,
            s.extract(comptime!(fragment * MmaSplitDTiles::SCORE_REGISTERS + i)),
        );
    }
    own
}

/// Stores the maxima of a fragment's rows in shared memory, where other warps with scores of the same rows read them.
/// `row` is the thread's first row.
#[cube]
pub(super) fn store_row_max<NS: Size>(
    s: Vector<f32, NS>,
    least: Pair,
    row: u32,
    offsets: &SharedOffsets,
    roles: &Roles,
    #[comptime] tiles: MmaSplitDTiles,
) {
    let own = quad_max(thread_row_max::<NS>(s, least, MmaSplitDTiles::SCORE_KEYS));
    store_row_pair(
        own,
        offsets.row_max_at + roles.key_group * comptime!(4 * tiles.rows as u32),
        row,
    );
}

/// Several warps compute scores of the same rows, and each of them has stored its own maximum of every row. Loads these
/// maxima for the thread's two rows. Returns the largest maximum of each row.
#[cube]
fn load_row_max(offsets: &SharedOffsets, row: u32, #[comptime] tiles: MmaSplitDTiles) -> Pair {
    let own = load_row_pair(offsets.row_max_at, row);
    let mut first = own.first;
    let mut second = own.second;
    #[unroll]
    for group in 1..tiles.key_groups() {
        let table = offsets.row_max_at + comptime!((4 * group * tiles.rows) as u32);
        let other = load_row_pair(table, row);
        first = max(first, other.first);
        second = max(second, other.second);
    }
    Pair { first, second }
}

/// P for a warp's scores, and the softmax states after the block. A register holds two half-precision probabilities. P
/// therefore fills only the first half of the registers that held a fragment's scores.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Weighed<AS: Size> {
    pub pairs: Vector<f32, AS>,
    pub state_0: SoftmaxState,
    pub state_1: SoftmaxState,
}

/// Computes P from a warp's scores. Before the call, all warps that compute scores of the same rows must have stored
/// their row maxima.
///
/// The function also stores rescale factors in shared memory. These factors rescale O, the sum over the earlier blocks.
/// `row` is the thread's first row.
#[cube]
pub(super) fn compute_p<F: Float, NB: Size, NS: Size, AS: Size>(
    s: Vector<f32, AS>,
    first_key: i32,
    rows_0: &RowPair,
    rows_1: &RowPair,
    scoring: &Scoring<F, NB>,
    before_0: SoftmaxState,
    before_1: SoftmaxState,
    row: u32,
    offsets: &SharedOffsets,
    roles: &Roles,
    scale_log2: f32,
    #[comptime] tiles: MmaSplitDTiles,
    #[comptime] kind: TileKind,
) -> Weighed<AS> {
    let mut pairs = s;
    let mut state_0 = before_0;
    let mut state_1 = before_1;
    #[unroll]
    for fragment in 0..tiles.score_fragments() {
        let before = if comptime!(fragment == 0) {
            before_0
        } else {
            before_1
        };
        let own_rows = if comptime!(fragment == 0) {
            rows_0
        } else {
            rows_1
        };
        let own_row = row + comptime!((fragment * FRAGMENT_ROWS) as u32);
        let made = rescaled::<NS>(
            score_fragment::<AS, NS>(s, fragment),
            load_row_max(offsets, own_row, tiles),
            before.row_max,
            scale_log2,
            scoring.arguments.negative_infinity,
            true,
            MmaSplitDTiles::SCORE_KEYS,
        );
        if roles.key_group == 0u32 {
            store_row_pair(made.factor, offsets.factors, own_row);
            let lane = UNIT_POS % 32u32;
            if lane == 0u32 {
                let fragments = comptime!(4 * fragment as u32);
                let at = offsets.moved + roles.score_row / 4u32 + fragments;
                store_shared(at, u32::cast_from(made.moved));
            }
        }
        let mut sum_0 = f32::new(0.0);
        let mut sum_1 = f32::new(0.0);
        #[unroll]
        for step in 0..comptime!(MmaSplitDTiles::SCORE_KEYS / 16) {
            let part = exp_scores::<NS>(made.s, made.row_max.shift, scale_log2, step, false);
            let words = draw_step::<F, NB>(
                scoring,
                own_rows,
                first_key + comptime!(16 * step as i32),
                comptime!(kind.heads == 1),
            );
            let p = packed_step::<F, NB>(
                part.values,
                words,
                scoring,
                comptime!(kind.heads == 1),
                tiles.half,
            );
            #[unroll]
            for i in 0..4usize {
                pairs.insert(
                    comptime!(fragment * MmaSplitDTiles::SCORE_REGISTERS + 4 * step + i),
                    f32::reinterpret(p.extract(i)),
                );
            }
            sum_0 += part.sums.first;
            sum_1 += part.sums.second;
        }
        let state = softmax_state::<NS>(made, before.sums, pair(sum_0, sum_1));
        if comptime!(fragment == 0) {
            state_0 = state;
        } else {
            state_1 = state;
        }
    }
    Weighed::<AS> {
        pairs,
        state_0,
        state_1,
    }
}

/// Returns the shared-memory address of P for main loop iterations whose number has the given `parity`. If there are
/// two buffers for P, parity 1 selects the second buffer.
#[cube]
pub(super) fn shared_probabilities(
    offsets: &SharedOffsets,
    parity: u32,
    #[comptime] tiles: MmaSplitDTiles,
) -> u32 {
    if comptime!(tiles.shares == 1) {
        offsets.probabilities
    } else {
        offsets.probabilities + parity * comptime!(tiles.probability_bytes() as u32)
    }
}

/// Returns the shared-memory address of the *used bits* for main loop iterations whose number has the given `parity`.
/// Each used bit belongs to one key. The bit is set if some row has a nonzero probability for this key.
#[cube]
fn shared_used(offsets: &SharedOffsets, parity: u32, #[comptime] tiles: MmaSplitDTiles) -> u32 {
    if comptime!(tiles.shares == 1) {
        offsets.used
    } else {
        offsets.used + parity * comptime!(MmaSplitDTiles::USED_BYTES as u32)
    }
}

/// Stores a warp's P in shared memory. All warps that compute the output of the same rows load this P from there.
#[cube]
pub(super) fn share<AS: Size>(
    pairs: Vector<f32, AS>,
    offsets: &SharedOffsets,
    roles: &Roles,
    parity: u32,
    #[comptime] tiles: MmaSplitDTiles,
    #[comptime] kind: TileKind,
) {
    store_fragments::<f32, AS>(
        pair_address(
            shared_probabilities(offsets, parity, tiles),
            roles.score_row,
            roles.key_group,
            tiles.rows,
        ),
        pairs,
        tiles.score_fragments(),
        MmaSplitDTiles::SCORE_REGISTERS,
    );
    if comptime!(kind.leaves_masked()) {
        let used = used_pairs::<AS>(pairs, tiles);
        let lane = UNIT_POS % 32u32;
        if lane < 4u32 {
            store_shared(
                shared_used(offsets, parity, tiles) + roles.warp * 16u32 + lane * 4u32,
                used,
            );
        }
    }
}

/// Returns one bit for each key for which this lane holds probabilities. The bit is set if some row of the warp has a
/// nonzero probability for the key. The lane holds four keys in each group of 16 keys. Bits `4 s` to `4 s + 3` are for
/// the lane's four keys in the `s`-th group.
#[cube]
fn used_pairs<AS: Size>(pairs: Vector<f32, AS>, #[comptime] tiles: MmaSplitDTiles) -> u32 {
    let mut used = 0u32;
    #[unroll]
    for tile in 0..comptime!(MmaSplitDTiles::SCORE_KEYS / 8) {
        let mut both = 0u32;
        #[unroll]
        for fragment in 0..tiles.score_fragments() {
            let first = comptime!(fragment * MmaSplitDTiles::SCORE_REGISTERS + 2 * tile);
            both |= u32::reinterpret(pairs.extract(first))
                | u32::reinterpret(pairs.extract(comptime!(first + 1)));
        }
        used |= select(
            both & 0xFFFFu32 != 0u32,
            comptime!(1u32 << (2 * tile)),
            0u32,
        ) | select(both >= 0x10000u32, comptime!(2u32 << (2 * tile)), 0u32);
    }
    used |= plane_shuffle_xor(used, 4u32);
    used |= plane_shuffle_xor(used, 8u32);
    used |= plane_shuffle_xor(used, 16u32);
    used
}

/// Loads the *used bits* of this lane. In the GEMM P·V, the lane multiplies some of the block's keys, and each of these
/// keys has one bit. The bit is set if at least one of the warp's output rows has a nonzero probability for the key.
#[cube]
pub(super) fn load_used_keys(
    offsets: &SharedOffsets,
    roles: &Roles,
    parity: u32,
    #[comptime] tiles: MmaSplitDTiles,
) -> u32 {
    let first_warp = roles.output_row / comptime!(tiles.score_rows() as u32)
        * comptime!(tiles.key_groups() as u32);
    used_by_warps(
        shared_used(offsets, parity, tiles) + first_warp * 16u32,
        comptime!(tiles.output_rows().div_ceil(tiles.score_rows()) * tiles.key_groups()),
        tiles.key_groups(),
    )
}
