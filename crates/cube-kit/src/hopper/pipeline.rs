//! Pipelines: ring buffers of stages in shared memory. TMA fills the stages in order.

use cubecl::prelude::*;

/// A stage of a pipeline in one pass over the ring buffer, and the parity of the barrier phase of that pass.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct PipelineState {
    /// The index of the stage.
    pub stage: u32,
    /// The parity of the phase: 0 in even passes over the ring buffer, and 1 in odd passes.
    pub parity: u32,
}

/// Returns the stage and the parity for the fill with index `index` of a ring buffer with `stages` stages.
#[cube]
pub fn pipeline_state(index: u32, #[comptime] stages: usize) -> PipelineState {
    let stages = comptime!(stages as u32);
    PipelineState {
        stage: index % stages,
        parity: index / stages % 2u32,
    }
}
