//! A block's P, of which each warpgroup makes half, and the maxima that both agree on.

use super::producer::Places;
use super::{CONSUMERS, HALF_KEYS, MAXIMA};
use crate::engine::wgmma::chunked::Ring;
use crate::engine::wgmma::plan::SplitDTiles;
use crate::engine::wgmma::zero_fill::tell_used;
use crate::fragment::softmax::{
    SoftmaxState, maxima, numerators, own_maxima, rescaled, softmax_state,
};
use crate::fragment::work_tile::TileKind;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::accumulator::{Pair, pair};
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{
    async_proxy_fence, barrier_arrive, barrier_wait, load_shared, named_barrier, pack,
    store_matrices, store_shared, uniform,
};
use cube_kit::hopper::wgmma::{descriptor, free_chunk, matrix_row};
use cubecl::prelude::*;

/// P of the `count`-th visited block.
#[cube]
pub(super) fn probabilities(places: &Places, count: u32) -> u32 {
    uniform(descriptor(
        places.probabilities + count % 2u32 * comptime!(2 * SplitDTiles::HALF_BYTES as u32),
    ))
}

/// Once at most `pending` products are in flight, frees the warpgroup's `own`-th chunk of values from chunk
/// `from` on.
#[cube]
pub(super) fn free_values(
    empty: u32,
    ring: Ring,
    from: u32,
    #[comptime] own: usize,
    #[comptime] pending: usize,
    #[comptime] tiles: SplitDTiles,
) {
    let chunk = pipeline_state(
        from + comptime!((SplitDTiles::WARPGROUPS * own) as u32),
        tiles.stages,
    );
    free_chunk(
        empty + 8u32 * chunk.stage,
        ring.elected,
        pending,
        SplitDTiles::WARPGROUPS,
    );
}

/// Where a block's last chunk of values, the second warpgroup's, needs the stage of its first, which is the first warpgroup's: the
/// second waits for that, too, before it gives it back. Who skipped a phase of a barrier would take the last but one for it, since
/// their parities are the same, and multiply what was there before.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn share_first_chunk(ring: Ring, values: u32, #[comptime] tiles: SplitDTiles) {
    if comptime!(tiles.frees_first_chunk_at_once()) {
        if UNIT_POS >= comptime!(WARPGROUP as u32) {
            let chunk = pipeline_state(values, tiles.stages);
            barrier_wait(ring.full + 8u32 * chunk.stage, chunk.parity);
            barrier_arrive(ring.empty + 8u32 * chunk.stage, ring.elected);
        }
    }
}

/// Gives the second warpgroup's own first chunk back once more, which it alone waited for.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn free_own_first_chunk(ring: Ring, values: u32, #[comptime] tiles: SplitDTiles) {
    if comptime!(tiles.frees_first_chunk_at_once()) {
        if UNIT_POS >= comptime!(WARPGROUP as u32) {
            let chunk = pipeline_state(values + 1u32, tiles.stages);
            barrier_arrive(ring.empty + 8u32 * chunk.stage, ring.elected);
        }
    }
}

/// The sum, or with `largest` the maximum, of both warpgroups' numbers of the thread's rows. The caller sees
/// to it that the last exchange through this buffer is over.
#[cube]
pub(super) fn exchange(places: &Places, own: Pair, buffer: u32, #[comptime] largest: bool) -> Pair {
    let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
    let lane = UNIT_POS % 32u32;
    let row = UNIT_POS / 32u32 % 4u32 * 16u32 + lane / 4u32;
    let of_warpgroup = comptime!(4 * SplitDTiles::ROWS as u32);
    let start = places.exchange + buffer * 2u32 * of_warpgroup + 4u32 * row;
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

/// Makes the warpgroup's half of P of the `count`-th visited block in shared memory. While the matrix unit is
/// `busy` with the values from chunk `values` on, frees these on the way.
#[cube]
pub(super) fn softmax<NS: Size>(
    s: Vector<f32, NS>,
    before: SoftmaxState,
    power: f32,
    negative_infinity: f32,
    places: &Places,
    ring: Ring,
    values: u32,
    count: u32,
    #[comptime] busy: bool,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) -> SoftmaxState {
    let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
    let own = maxima(own_maxima::<NS>(s, before.row_max.reference, HALF_KEYS));
    let largest = exchange(places, own, count % 2u32, true);
    if comptime!(busy && !tiles.frees_first_chunk_at_once()) {
        free_values(places.empty, ring, values, 0usize, 3usize, tiles);
    }
    let made = rescaled::<NS>(
        s,
        largest,
        before.row_max,
        power,
        negative_infinity,
        true,
        HALF_KEYS,
    );
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    let mut used = 0u32;
    let half = places.probabilities
        + (count % 2u32 * 2u32 + warpgroup) * comptime!(SplitDTiles::HALF_BYTES as u32);
    #[unroll]
    for step in 0..comptime!(HALF_KEYS / 16) {
        let part = numerators::<NS>(
            made.s,
            made.row_max.shift,
            power,
            step,
            comptime!(kind.leaves_masked()),
        );
        let e = part.values;
        store_matrices(
            matrix_row(half, step),
            pack(e.extract(0usize), e.extract(1usize), tiles.half),
            pack(e.extract(2usize), e.extract(3usize), tiles.half),
            pack(e.extract(4usize), e.extract(5usize), tiles.half),
            pack(e.extract(6usize), e.extract(7usize), tiles.half),
        );
        sum_0 += part.sums.first;
        sum_1 += part.sums.second;
        used |= part.used;
        if comptime!(busy && step == 1) {
            free_values(places.empty, ring, values, 1usize, 2usize, tiles);
        }
    }
    if comptime!(kind.leaves_masked()) {
        tell_used(
            places.used,
            used,
            warpgroup * comptime!((HALF_KEYS / 4) as u32),
            count,
        );
    }
    async_proxy_fence();
    if comptime!(busy) {
        free_values(places.empty, ring, values, 2usize, 1usize, tiles);
    }
    softmax_state::<NS>(made, before.sums, pair(sum_0, sum_1))
}
