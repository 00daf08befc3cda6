//! The unit engine: the kernels of `tiled` with products that need no plane operations, no matrix units, and little shared memory.

pub mod plan;

use crate::AttentionProblem;
#[cfg(feature = "cube")]
use crate::backend::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use crate::device::DeviceProfile;
use crate::engine::AttentionEngine;
#[cfg(feature = "cube")]
use crate::engine::Launch;
#[cfg(feature = "cube")]
use crate::select::BackwardRequest;
use crate::select::{Layouts, Refusal};
#[cfg(feature = "cube")]
use crate::tiled::launch;
use crate::tiled::plan::{BackwardPlan, ForwardPlan};
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;

/// The unit engine, which every device that runs CubeCL kernels can run.
pub struct Unit;

impl AttentionEngine for Unit {
    type Forward = ForwardPlan;
    type Backward = BackwardPlan;

    const READS_WORDS: bool = true;

    fn plan_forward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<ForwardPlan, Refusal> {
        plan::forward(problem, device, layouts)
    }

    fn plan_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<BackwardPlan, Refusal> {
        plan::backward(problem, device, layouts)
    }

    fn splits(plan: &ForwardPlan) -> usize {
        plan.splits
    }
}

#[cfg(feature = "cube")]
impl Launch for Unit {
    fn forward(
        plan: ForwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        launch::forward::launch(inputs, None, problem, plan)
    }

    fn backward(
        plan: BackwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        saved: AttentionSaved<CubeBackend>,
        problem: &AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<CubeBackend> {
        launch::backward::launch(inputs, saved, problem, plan, request)
    }
}
