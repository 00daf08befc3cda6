//! A ring of slots in shared memory, through which chunks come that all of a cube's warps copy and read.
//!
//! A chunk is full once the copies of all threads are there, and empty once all warps have read it. Nobody stops for the others: a warp
//! goes on to the next chunk where that is full, and where it is ahead waits for the slot that it is to fill.

use super::plan::ring::Ring;
use cube_kit::ampere::BARRIER_BYTES;
use cube_kit::ampere::barriers::{arrive_as_warp, arrive_with_copies, await_phase};
use cube_kit::hopper::ptx::barrier_init;
use cubecl::prelude::*;

/// Makes a ring's barriers, for one thread to do. The others may come near them after a sync.
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

/// A slot, and the parity of how often the ring has been gone through.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Turn {
    pub slot: u32,
    pub parity: u32,
}

/// The turn so many after one.
#[cube]
pub(super) fn turn_after(first: &Turn, #[comptime] count: usize, #[comptime] ring: Ring) -> Turn {
    let slots = comptime!(ring.slots as u32);
    let rounds = comptime!((count / ring.slots % 2) as u32);
    if comptime!(ring.chunks.is_multiple_of(ring.slots)) {
        // Every pass starts with the first slot.
        Turn {
            slot: u32::new(comptime!((count % ring.slots) as i64)),
            parity: first.parity ^ rounds,
        }
    } else {
        let sum = first.slot + comptime!((count % ring.slots) as u32);
        let wraps = sum >= slots;
        Turn {
            slot: select(wraps, sum - slots, sum),
            parity: first.parity ^ rounds ^ u32::cast_from(wraps),
        }
    }
}

/// Where a chunk lies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Place {
    pub slot: u32,
    /// The barriers at which it is told that the slot is full, and that it is empty.
    full: u32,
    empty: u32,
    parity: u32,
}

/// Where the `chunk`-th chunk of a pass lies whose first has the turn `first`, or one of the next pass.
#[cube]
pub(super) fn place_of(
    start: u32,
    first: &Turn,
    #[comptime] chunk: usize,
    #[comptime] ring: Ring,
) -> Place {
    let turn = turn_after(first, chunk, ring);
    let barriers = start
        + comptime!(ring.barriers_at as u32)
        + turn.slot * comptime!(Ring::SLOT_BARRIERS as u32);
    Place {
        slot: start
            + comptime!(ring.slots_at as u32)
            + turn.slot * comptime!(ring.slot_bytes as u32),
        full: barriers,
        empty: barriers + comptime!(BARRIER_BYTES as u32),
        parity: turn.parity,
    }
}

/// Waits until all have read what was in a slot that is to be filled.
#[cube]
pub(super) fn await_empty(place: &Place) {
    await_phase(place.empty, place.parity ^ 1u32);
}

/// Tells that the slot is full once this thread's copies are there.
#[cube]
pub(super) fn tell_full(place: &Place) {
    arrive_with_copies(place.full);
}

/// Waits until a chunk is there.
#[cube]
pub(super) fn await_full(place: &Place) {
    await_phase(place.full, place.parity);
}

/// Tells that the warp has read a chunk.
#[cube]
pub(super) fn tell_empty(place: &Place) {
    arrive_as_warp(place.empty);
}
