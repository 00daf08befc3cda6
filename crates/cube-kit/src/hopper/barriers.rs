//! Named barriers at which warpgroups synchronize.

use crate::hopper::WARPGROUP;
use crate::nvidia::ptx::{named_barrier, named_barrier_arrive};
use cubecl::prelude::*;

/// Synchronizes the threads of one warpgroup. The id of the named barrier is 3 plus the warpgroup's index. Kernels use
/// the ids below 3 for their own barriers.
#[cube]
pub fn warpgroup_barrier() {
    let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
    named_barrier(warpgroup + 3u32, WARPGROUP);
}

/// The id of the first named barrier that orders warpgroups. `warpgroup_barrier` uses the ids 3 to 5.
const FIRST_ORDERING_BARRIER: u32 = 6;

/// Waits until the previous warpgroup has issued its `wgmma`.
#[cube]
pub fn ordering_barrier_wait(warpgroup: u32) {
    named_barrier(warpgroup + FIRST_ORDERING_BARRIER, comptime!(2 * WARPGROUP));
}

/// Signals the next warpgroup that it may issue its `wgmma`.
#[cube]
pub fn ordering_barrier_arrive(warpgroup: u32, #[comptime] warpgroups: usize) {
    let last = warpgroup == comptime!(warpgroups as u32 - 1);
    let next = select(last, 0u32, warpgroup + 1u32);
    named_barrier_arrive(next + FIRST_ORDERING_BARRIER, comptime!(2 * WARPGROUP));
}
