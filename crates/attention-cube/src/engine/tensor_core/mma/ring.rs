//! A ring of slots in shared memory, through which chunks of operands pass. All warps of a CTA copy chunks into the
//! ring and read chunks from it. A pass is one iteration of the main loop. All passes have the same number of chunks.
//!
//! A slot is full when all threads have completed their copy operations into the slot, and empty when all warps have read
//! the slot. A warp continues with the next chunk as soon as that chunk's slot is full, without a CTA-wide barrier.

use super::plan::ring::Ring;
use cube_kit::ampere::BARRIER_BYTES;
use cube_kit::nvidia::mbarrier::barrier_init;
use cube_kit::nvidia::mbarrier::{arrive_as_warp, arrive_with_copies, await_phase};
use cubecl::prelude::*;

/// Initializes the full and empty barriers of all slots. One thread calls this function, and the CTA must synchronize before
/// other threads use the barriers.
#[cube]
pub(super) fn make_ring(
    start: u32,
    #[comptime] ring: Ring,
    #[comptime] units: usize,
    #[comptime] warps: usize,
) {
    let barriers = start + comptime!(ring.barriers_at as u32);
    #[unroll]
    for slot in 0..ring.slots {
        let at = barriers + comptime!((slot * Ring::SLOT_BARRIERS) as u32);
        barrier_init(at, units);
        barrier_init(at + comptime!(BARRIER_BYTES as u32), warps);
    }
}

/// The slot of a chunk in the ring buffer, and the parity with which warps wait for this chunk at the slot's mbarriers.
/// The parity flips each time the chunks wrap around from the ring's last slot to its first.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct RingTurn {
    pub slot: u32,
    pub parity: u32,
}

/// Returns the slot and parity of the chunk that comes `count` chunks after the chunk in slot `first`.
#[cube]
pub(super) fn turn_after(
    first: &RingTurn,
    #[comptime] count: usize,
    #[comptime] ring: Ring,
) -> RingTurn {
    let slots = comptime!(ring.slots as u32);
    let rounds = comptime!((count / ring.slots % 2) as u32);
    if comptime!(ring.chunks.is_multiple_of(ring.slots)) {
        // The slot is a compile-time constant, because the number of chunks in a pass (main loop iteration) is a
        // multiple of the number of slots.
        RingTurn {
            slot: u32::new(comptime!((count % ring.slots) as i64)),
            parity: first.parity ^ rounds,
        }
    } else {
        let sum = first.slot + comptime!((count % ring.slots) as u32);
        let wraps = sum >= slots;
        RingTurn {
            slot: select(wraps, sum - slots, sum),
            parity: first.parity ^ rounds ^ u32::cast_from(wraps),
        }
    }
}

/// The addresses of the slot that a chunk fills and of the slot's two barriers, and the mbarrier parity to wait for.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct RingSlot {
    pub slot: u32,
    /// The addresses of the slot's two barriers (`full` and `empty`). The barrier `full` completes when the slot is
    /// full. The barrier `empty` completes when all warps have read the slot.
    full: u32,
    empty: u32,
    parity: u32,
}

/// Returns the slot of the `chunk`-th chunk of a pass (main loop iteration). `first` is the slot of the pass's first
/// chunk. An index `chunk` past the pass's last chunk counts on into the next pass.
#[cube]
pub(super) fn ring_slot_of(
    start: u32,
    first: &RingTurn,
    #[comptime] chunk: usize,
    #[comptime] ring: Ring,
) -> RingSlot {
    let turn = turn_after(first, chunk, ring);
    let barriers = start
        + comptime!(ring.barriers_at as u32)
        + turn.slot * comptime!(Ring::SLOT_BARRIERS as u32);
    RingSlot {
        slot: start
            + comptime!(ring.slots_at as u32)
            + turn.slot * comptime!(ring.slot_bytes as u32),
        full: barriers,
        empty: barriers + comptime!(BARRIER_BYTES as u32),
        parity: turn.parity,
    }
}

/// Waits until all warps have read the chunk that the slot held before. The calling thread may then refill the slot.
#[cube]
pub(super) fn await_empty(place: &RingSlot) {
    await_phase(place.empty, place.parity ^ 1u32);
}

/// Makes the calling thread arrive at the slot's `full` barrier once its copy operations are complete. The thread does not
/// wait.
#[cube]
pub(super) fn signal_full(place: &RingSlot) {
    arrive_with_copies(place.full);
}

/// Waits until all threads have completed their copy operations into the slot.
#[cube]
pub(super) fn await_full(place: &RingSlot) {
    await_phase(place.full, place.parity);
}

/// Signals that the calling warp has read the chunk in the slot.
#[cube]
pub(super) fn signal_empty(place: &RingSlot) {
    arrive_as_warp(place.empty);
}
