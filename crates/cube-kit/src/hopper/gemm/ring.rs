//! The ring buffer of a GEMM in shared memory, with its barriers.

use crate::hopper::gemm::plan::RingLayout;
use crate::hopper::ptx::barrier_init_fence;
use crate::nvidia::mbarrier::barrier_init;
use crate::nvidia::ptx::shared_address;
use cubecl::prelude::*;

/// The shared memory addresses of the ring buffer and of its first barriers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Ring {
    /// The address of the first stage, which is the beginning of the cube's shared memory.
    pub stages: u32,
    /// The address of the barrier that completes when TMA has filled the first stage.
    pub full: u32,
    /// The address of the barrier that completes when the consumers have read the first stage.
    pub empty: u32,
}

/// Allocates the cube's shared memory, and initializes the barriers of the ring buffer. Synchronizes the cube.
#[cube]
pub fn prepare_ring(#[comptime] layout: RingLayout) -> Ring {
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(layout.shared_memory() / 4), 1024usize);
    let stages = shared_address(&memory);
    let full = stages + comptime!(layout.barriers_at as u32);
    let empty = full + comptime!(8 * layout.stages as u32);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..layout.stages {
            barrier_init(full + comptime!(8 * stage as u32), 1usize);
            barrier_init(empty + comptime!(8 * stage as u32), layout.arrivals);
        }
        barrier_init_fence();
    }
    sync_cube();
    Ring {
        stages,
        full,
        empty,
    }
}
