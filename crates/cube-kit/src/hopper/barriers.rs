//! The named barriers at which warpgroups meet.

use crate::hopper::WARPGROUP;
use crate::hopper::ptx::{named_barrier, named_barrier_arrive};
use cubecl::prelude::*;

/// A warpgroup meets by itself. Numbers from 3 on; the kernels have use for those before.
#[cube]
pub fn warpgroup_barrier() {
    let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
    named_barrier(warpgroup + 3u32, WARPGROUP);
}

/// The first of the warpgroups' barriers for turns, after those of `warpgroup_barrier`.
const FIRST_ORDERING_BARRIER: u32 = 6;

/// Waits until the warpgroup before this one has issued its products.
#[cube]
pub fn ordering_barrier_wait(warpgroup: u32) {
    named_barrier(warpgroup + FIRST_ORDERING_BARRIER, comptime!(2 * WARPGROUP));
}

/// Lets the next warpgroup issue its products.
#[cube]
pub fn ordering_barrier_arrive(warpgroup: u32, #[comptime] warpgroups: usize) {
    let last = warpgroup == comptime!(warpgroups as u32 - 1);
    let next = select(last, 0u32, warpgroup + 1u32);
    named_barrier_arrive(next + FIRST_ORDERING_BARRIER, comptime!(2 * WARPGROUP));
}
