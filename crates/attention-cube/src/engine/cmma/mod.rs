//! The cmma engine: the kernels of `tiled` with their products in fragments, which the matrix units of most cards have through
//! `cubecl::cmma`: Vulkan, Metal, HIP, and NVIDIA's older than Ampere.

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
use crate::select::{Layouts, Refusal, Warning};
#[cfg(feature = "cube")]
use crate::tiled::launch;
use crate::tiled::plan::{BackwardPlan, ForwardPlan};
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;

/// The cmma engine.
pub struct Cmma;

impl AttentionEngine for Cmma {
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

    fn warnings(_problem: &AttentionProblem, plan: &BackwardPlan) -> Vec<Warning> {
        let kernels = [plan.query, plan.key_value];
        let in_f16 = kernels
            .iter()
            .any(|tiles| tiles.product_dtype() == DType::F16);
        Vec::from_iter(in_f16.then_some(Warning::ScoreGradientsInF16))
    }
}

#[cfg(feature = "cube")]
impl Launch for Cmma {
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
