//! Pipelines: ring buffers in shared memory. TMA fills the stages (equal slices) of a ring buffer in order.

use cubecl::prelude::*;

/// The ring buffer stage that a fill overwrites, and the phase parity of the stage's barriers during this fill.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct PipelineState {
    /// The index of the ring buffer stage.
    pub stage: u32,
    /// The parity of the phase. The parity is 0 in the first pass over the ring buffer, and changes with each pass.
    pub parity: u32,
}

/// Returns the ring buffer stage and the barrier parity of fill number `index`, for a ring buffer with `stages` stages.
#[cube]
pub fn pipeline_state(index: u32, #[comptime] stages: usize) -> PipelineState {
    let stages = comptime!(stages as u32);
    PipelineState {
        stage: index % stages,
        parity: index / stages % 2u32,
    }
}
