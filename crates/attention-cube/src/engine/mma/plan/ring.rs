//! The sizes of a ring of slots in shared memory, through which chunks come that all of a cube's warps copy and read.

use cube_kit::ampere::BARRIER_BYTES;

/// A ring's sizes, and where it lies behind the start of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    /// Chunks of a pass.
    pub chunks: usize,
    /// Slots, at least 2 and at most one more than there are chunks.
    pub slots: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Where the slots start.
    pub slots_at: usize,
    /// Where the barriers start: of each slot that it is full, and that it is empty.
    pub barriers_at: usize,
}

impl Ring {
    /// Bytes of a slot's barriers.
    pub const SLOT_BARRIERS: usize = 2 * BARRIER_BYTES;

    /// Where the barriers end.
    pub const fn end(&self) -> usize {
        self.barriers_at + self.slots * Self::SLOT_BARRIERS
    }
}
