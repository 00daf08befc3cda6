//! Pipelines: ring buffers of stages in shared memory. TMA fills the stages in order.

use cubecl::prelude::*;

/// A stage of a pipeline, and the parity of the phase of its barriers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct PipelineState {
    /// Index of the stage.
    pub stage: u32,
    /// The parity of the phase: 0 in even passes over the ring buffer, 1 in odd passes.
    pub parity: u32,
}

/// Returns the stage and parity of the `index`-th item in a ring buffer of `stages` stages.
#[cube]
pub fn pipeline_state(index: u32, #[comptime] stages: usize) -> PipelineState {
    let stages = comptime!(stages as u32);
    PipelineState {
        stage: index % stages,
        parity: index / stages % 2u32,
    }
}
