//! Rings of stages in shared memory, through which the copy engine's boxes go in their order.

use cubecl::prelude::*;

/// A stage of a ring, and the parity of its phase.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct PipelineState {
    /// The stage.
    pub stage: u32,
    /// 0 in even rounds of the ring, 1 in odd ones.
    pub parity: u32,
}

/// Where the `index`-th that goes through a ring of `stages` is.
#[cube]
pub fn pipeline_state(index: u32, #[comptime] stages: usize) -> PipelineState {
    let stages = comptime!(stages as u32);
    PipelineState {
        stage: index % stages,
        parity: index / stages % 2u32,
    }
}
