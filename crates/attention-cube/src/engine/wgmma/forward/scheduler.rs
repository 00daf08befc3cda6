//! Which item a cube of the forward takes in its next turn: one that its number tells, or, where documents make tiles differ, the
//! next that no cube has taken.
//!
//! The thread that fetches takes it when it has fetched all of the last tile, and tells those who multiply by a notice in shared
//! memory. There are two notices in turn, each with a barrier that is full when it may be read, and one that is when it may be
//! overwritten.

use crate::engine::wgmma::plan::NOTICE_BYTES;
use crate::fragment::scoring::Masking;
use crate::fragment::work_tile::{TileKind, TileScheduler};
use crate::math::schedule::{Grid, Schedule, next_item};
use crate::math::visibility::BLOCK_BOUNDS;
use cube_kit::hopper::ptx::{
    barrier_arrive, barrier_init, barrier_wait, count_up, load_shared, store_shared, uniform,
    word_address,
};
use cubecl::prelude::*;

/// Whether cubes take whichever item is next, and not those of their numbers.
const fn takes_items(kind: TileKind) -> bool {
    kind.fragment.structure.segments && !kind.split
}

/// Where notices start: behind the `bytes` of a cube's other shared memory.
#[cube]
pub(super) fn notices_at(start: u32, #[comptime] bytes: usize, #[comptime] kind: TileKind) -> u32 {
    if comptime!(takes_items(kind)) {
        start + comptime!(bytes as u32)
    } else {
        start
    }
}

/// Bytes of shared memory for notices.
pub(super) const fn notice_bytes(kind: TileKind) -> usize {
    if takes_items(kind) { NOTICE_BYTES } else { 0 }
}

/// Makes the notices' barriers, where `warps` multiply.
#[cube]
pub(super) fn init_notices(notices: u32, #[comptime] warps: usize, #[comptime] kind: TileKind) {
    if comptime!(takes_items(kind)) {
        #[unroll]
        for notice in 0..2u32 {
            barrier_init(full(notices, notice), 1usize);
            barrier_init(empty(notices, notice), warps);
        }
    }
}

/// The item after the `turn`-th, for the thread that fetches, which tells the others.
#[cube]
pub(super) fn take_item(
    scheduler: &TileScheduler,
    item: u32,
    turn: u32,
    masking: &Masking,
    notices: u32,
    #[comptime] kind: TileKind,
) -> u32 {
    if comptime!(takes_items(kind)) {
        let notice = turn % 2u32;
        barrier_wait(empty(notices, notice), (turn / 2u32 % 2u32) ^ 1u32);
        // The first items are the cubes' numbers.
        let taken = scheduler.schedule.launched + count_taken(&scheduler.grid, masking);
        store_shared(notices + 4u32 * notice, taken);
        barrier_arrive(full(notices, notice), 1u32);
        taken
    } else {
        next_item(&scheduler.schedule, item, turn)
    }
}

/// The same for those who multiply.
#[cube]
pub(super) fn told_item(
    schedule: &Schedule,
    item: u32,
    turn: u32,
    notices: u32,
    elected: u32,
    #[comptime] kind: TileKind,
) -> u32 {
    if comptime!(takes_items(kind)) {
        let notice = turn % 2u32;
        barrier_wait(full(notices, notice), turn / 2u32 % 2u32);
        // All lanes have read it when one of them has this.
        let taken = uniform(load_shared(notices + 4u32 * notice));
        barrier_arrive(empty(notices, notice), elected);
        taken
    } else {
        next_item(schedule, item, turn)
    }
}

/// Counts an item as taken, after the integers of the blocks of keys; how many were before.
#[cube]
fn count_taken(grid: &Grid, masking: &Masking) -> u32 {
    let extent = &masking.extent;
    let batches = grid.planes / grid.heads;
    let at = extent.key_bounds + comptime!(BLOCK_BOUNDS as u32) * batches * extent.key_blocks;
    #[comptime]
    match &masking.lengths_and_ids {
        ComptimeOption::Some(lengths_and_ids) => {
            // SAFETY: only the address is taken; the counter is one of the integers.
            let start = unsafe { lengths_and_ids.as_slice().as_ptr_unchecked() };
            count_up(word_address::<i32>(start, at as u64))
        }
        ComptimeOption::None => 0u32.runtime(),
    }
}

/// A notice's barriers, after both words.
#[cube]
fn full(notices: u32, notice: u32) -> u32 {
    notices + 8u32 + 8u32 * notice
}

#[cube]
fn empty(notices: u32, notice: u32) -> u32 {
    notices + 24u32 + 8u32 * notice
}
