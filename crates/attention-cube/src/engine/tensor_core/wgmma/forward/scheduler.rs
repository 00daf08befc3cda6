//! The tile scheduler of a forward CTA. A work item is a tile, or a pair of tiles.
//!
//! Usually the CTA computes its work items from its own index. With segments or intervals of visible keys, tiles differ
//! in work. In this case, the CTA takes its work items from a counter in global memory, longest tiles first.
//!
//! The producer thread takes an item from the counter, and passes the item to the consumers through a mailbox in shared
//! memory. The mailbox has space for two messages, each with a full barrier and an empty barrier.

use crate::engine::tensor_core::common::scoring::Masking;
use crate::engine::tensor_core::common::tile_scheduler::{TileKind, TileScheduler, ordered_item};
use crate::engine::tensor_core::wgmma::plan::MAILBOX_BYTES;
use crate::math::longest_first::counter_at;
use crate::math::schedule::{Grid, Schedule, next_item};
use cube_kit::hopper::ptx::{barrier_arrive, barrier_wait};
use cube_kit::nvidia::mbarrier::barrier_init;
use cube_kit::nvidia::ptx::{atomic_inc, load_shared, store_shared, uniform, word_address};
use cubecl::prelude::*;

/// True if each CTA takes its work items from the counter in global memory.
const fn takes_items(kind: TileKind) -> bool {
    kind.fragment.structure.has_bounds() && !kind.split
}

/// Returns the address of the mailbox, which follows the first `bytes` bytes of the CTA's shared memory.
#[cube]
pub(super) fn mailbox_at(start: u32, #[comptime] bytes: usize, #[comptime] kind: TileKind) -> u32 {
    if comptime!(takes_items(kind)) {
        start + comptime!(bytes as u32)
    } else {
        start
    }
}

/// The bytes of shared memory that the mailbox takes.
pub(super) const fn mailbox_bytes(kind: TileKind) -> usize {
    if takes_items(kind) { MAILBOX_BYTES } else { 0 }
}

/// Initializes the barriers of the mailbox. `warps` consumer warps read messages from the mailbox.
#[cube]
pub(super) fn init_mailbox(mailbox: u32, #[comptime] warps: usize, #[comptime] kind: TileKind) {
    if comptime!(takes_items(kind)) {
        #[unroll]
        for message in 0..2u32 {
            barrier_init(full(mailbox, message), 1usize);
            barrier_init(empty(mailbox, message), warps);
        }
    }
}

/// Returns the work item of the CTA's next iteration, `turn + 1`. Each iteration processes one tile. If the work item
/// comes from the counter, the function also sends the item to the consumers. The producer thread calls this function.
#[cube]
pub(super) fn take_item(
    scheduler: &TileScheduler,
    item: u32,
    turn: u32,
    masking: &Masking,
    mailbox: u32,
    #[comptime] kind: TileKind,
) -> u32 {
    if comptime!(takes_items(kind)) {
        let message = turn % 2u32;
        barrier_wait(empty(mailbox, message), (turn / 2u32 % 2u32) ^ 1u32);
        // The first work item of each of the `launched` CTAs is the CTA's own index. The counter starts at 0, so adding
        // `launched` gives the items from `launched` on.
        let taken = scheduler.schedule.launched + count_taken(&scheduler.grid, masking);
        let taken = ordered_item(scheduler, taken, masking, kind);
        store_shared(mailbox + 4u32 * message, taken);
        barrier_arrive(full(mailbox, message), 1u32);
        taken
    } else {
        next_item(&scheduler.schedule, item, turn)
    }
}

/// Returns the work item of the CTA's next iteration, `turn + 1`. Each iteration processes one tile. The consumer
/// threads call this function.
#[cube]
pub(super) fn receive_item(
    schedule: &Schedule,
    item: u32,
    turn: u32,
    mailbox: u32,
    elected: u32,
    #[comptime] kind: TileKind,
) -> u32 {
    if comptime!(takes_items(kind)) {
        let message = turn % 2u32;
        barrier_wait(full(mailbox, message), turn / 2u32 % 2u32);
        // When `uniform` returns, all lanes of the warp have read the message. One lane can then free the message for
        // the whole warp.
        let taken = uniform(load_shared(mailbox + 4u32 * message));
        barrier_arrive(empty(mailbox, message), elected);
        taken
    } else {
        next_item(schedule, item, turn)
    }
}

/// Increments the counter of taken work items in global memory, and returns the counter's old value.
#[cube]
fn count_taken(grid: &Grid, masking: &Masking) -> u32 {
    let at = counter_at(&masking.seq_lens, grid.planes / grid.heads);
    #[comptime]
    match &masking.lengths_and_ids {
        ComptimeOption::Some(lengths_and_ids) => {
            // SAFETY: this expression only takes the address of `lengths_and_ids`. The host reserves element `at` of this
            // tensor for the counter.
            let start = unsafe { lengths_and_ids.as_slice().as_ptr_unchecked() };
            atomic_inc(word_address::<i32>(start, at as u64))
        }
        ComptimeOption::None => 0u32.runtime(),
    }
}

/// Returns the address of the full barrier of message `message`. In the mailbox, the barriers follow the two message
/// words.
#[cube]
fn full(mailbox: u32, message: u32) -> u32 {
    mailbox + 8u32 + 8u32 * message
}

#[cube]
fn empty(mailbox: u32, message: u32) -> u32 {
    mailbox + 24u32 + 8u32 * message
}
