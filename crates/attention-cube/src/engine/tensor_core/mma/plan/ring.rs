//! The sizes of the ring buffer in shared memory. Chunks of operands pass through the ring buffer.

use cube_kit::ampere::BARRIER_BYTES;

/// The sizes of a ring buffer for operand chunks, and its byte offsets from the start of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    /// The number of chunks that the warps read in one pass. A pass is one iteration of the main loop.
    pub chunks: usize,
    /// The number of slots: at least 2, and at most one more than the number of chunks per main loop iteration.
    pub slots: usize,
    /// The bytes of a slot, which holds one chunk.
    pub slot_bytes: usize,
    /// The byte offset of the first slot.
    pub slots_at: usize,
    /// The byte offset of the barriers. Each slot has a `full` and an `empty` barrier.
    pub barriers_at: usize,
}

impl Ring {
    /// The bytes of a slot's two barriers.
    pub const SLOT_BARRIERS: usize = 2 * BARRIER_BYTES;

    /// The byte offset of the first byte after the ring buffer. The barriers are the last data of the ring buffer.
    pub const fn end(&self) -> usize {
        self.barriers_at + self.slots * Self::SLOT_BARRIERS
    }
}
