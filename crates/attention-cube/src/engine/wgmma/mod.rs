//! The wgmma engine, for NVIDIA's Hopper: TMA, mbarriers and warpgroup matrix products.

#[cfg(feature = "cuda")]
pub(crate) mod backward;
#[cfg(feature = "cuda")]
pub(crate) mod chunked;
#[cfg(feature = "cuda")]
pub(crate) mod forward;
#[cfg(feature = "cuda")]
pub(crate) mod launch;
#[cfg(feature = "cuda")]
pub(crate) mod output;
pub mod plan;
#[cfg(all(test, feature = "cuda"))]
mod source;
#[cfg(feature = "cuda")]
pub(crate) mod zero_fill;

use crate::AttentionProblem;
#[cfg(feature = "cuda")]
use crate::arguments::BROADCAST_QUERIES;
#[cfg(feature = "cuda")]
use crate::backend::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use crate::device::DeviceProfile;
use crate::engine::AttentionEngine;
#[cfg(feature = "cuda")]
use crate::engine::Launch;
#[cfg(feature = "cuda")]
use crate::passes::aligned::{aligned, aligned_inputs};
#[cfg(feature = "cuda")]
use crate::select::BackwardRequest;
use crate::select::{Layouts, Refusal, Warning};
use burn::tensor::DType;
#[cfg(feature = "cuda")]
use burn_cubecl::CubeBackend;
use plan::{BackwardPlan, ForwardPlan};

/// The wgmma engine. Its kernels are there with the feature `cuda`, its plans and refusals always.
pub struct Wgmma;

impl AttentionEngine for Wgmma {
    type Forward = ForwardPlan;
    type Backward = BackwardPlan;

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

    fn warnings(problem: &AttentionProblem, _plan: &BackwardPlan) -> Vec<Warning> {
        let in_f16 = problem.dtype == DType::F16;
        Vec::from_iter(in_f16.then_some(Warning::ScoreGradientsInF16))
    }
}

#[cfg(feature = "cuda")]
impl Launch for Wgmma {
    fn forward(
        plan: ForwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        let inputs = aligned_inputs(inputs, plan.copies);
        launch::forward::forward(inputs, problem, plan)
    }

    fn backward(
        plan: BackwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        saved: AttentionSaved<CubeBackend>,
        problem: &AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<CubeBackend> {
        let copied = plan.copies.output_gradient;
        let saved = AttentionSaved {
            output_gradient: aligned(saved.output_gradient, BROADCAST_QUERIES, copied),
            ..saved
        };
        let inputs = aligned_inputs(inputs, plan.copies);
        launch::backward::launch(inputs, saved, problem, plan, request)
    }
}
