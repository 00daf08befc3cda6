//! The mma engine, for NVIDIA's cards since Ampere: `mma.sync`, `ldmatrix` and `cp.async`.

#[cfg(feature = "cuda")]
pub(crate) mod backward;
#[cfg(feature = "cuda")]
pub(crate) mod forward;
#[cfg(feature = "cuda")]
pub(crate) mod fragments;
#[cfg(feature = "cuda")]
mod launch;
pub mod plan;
#[cfg(feature = "cuda")]
mod ring;
#[cfg(all(test, feature = "cuda"))]
mod source;

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
#[cfg(feature = "cuda")]
use crate::tiled::launch::forward::Scales;
use burn::tensor::DType;
#[cfg(feature = "cuda")]
use burn_cubecl::CubeBackend;
use plan::{BackwardPlan, ForwardPlan};

/// The mma engine. Its kernels are there with the feature `cuda`, its plans and refusals always.
pub struct Mma;

impl AttentionEngine for Mma {
    type Forward = ForwardPlan;
    type Backward = BackwardPlan;

    const READS_WORDS: bool = true;

    fn plan_forward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<ForwardPlan, Refusal> {
        plan::forward(problem, device, layouts, false)
    }

    fn plan_forward_as_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<ForwardPlan, Refusal> {
        plan::forward(problem, device, layouts, true)
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
impl Mma {
    /// The output and the logsumexp of a problem whose keys and values are words of int8 with `scales`.
    pub(crate) fn forward_of_words(
        plan: ForwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        scales: Scales,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        let inputs = aligned_inputs(inputs, plan.copies);
        launch::forward(inputs, Some(scales), problem, plan)
    }
}

#[cfg(feature = "cuda")]
impl Launch for Mma {
    fn forward(
        plan: ForwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        let inputs = aligned_inputs(inputs, plan.copies);
        launch::forward(inputs, None, problem, plan)
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
        launch::backward::backward(inputs, saved, problem, plan, request)
    }
}
