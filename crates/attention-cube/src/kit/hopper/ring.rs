//! Rings of stages in shared memory, through which the copy engine's boxes go in their order.

use cubecl::prelude::*;

/// A stage of a ring, and the parity of its phase.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Turn {
    pub stage: u32,
    pub parity: u32,
}

/// Where the `index`-th that goes through a ring of `stages` is.
#[cube]
pub(crate) fn stage_turn(index: u32, #[comptime] stages: usize) -> Turn {
    let stages = comptime!(stages as u32);
    Turn {
        stage: index % stages,
        parity: index / stages % 2u32,
    }
}
