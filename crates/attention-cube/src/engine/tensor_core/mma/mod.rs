//! The mma engine, for NVIDIA GPUs since Ampere. Its kernels use `mma.sync`, `ldmatrix` and `cp.async`.

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

#[cfg(feature = "cuda")]
use crate::auxiliary::contiguous_copy::{aligned, aligned_inputs};
use crate::engine::api::AttentionEngine;
use crate::engine::api::DECODE_ROWS;
#[cfg(feature = "cuda")]
use crate::engine::api::Launch;
#[cfg(feature = "cuda")]
use crate::engine::api::RowScales;
#[cfg(feature = "cuda")]
use crate::kernel_args::BROADCAST_QUERIES;
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::{Refusal, Warning};
#[cfg(feature = "cuda")]
use crate::types::request::BackwardRequest;
use crate::types::request::{Layouts, Pass};
#[cfg(feature = "cuda")]
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use burn::tensor::DType;
#[cfg(feature = "cuda")]
use burn_cubecl::CubeBackend;
use plan::{MmaBackwardPlan, MmaForwardPlan};

/// The mma engine. Its kernels are compiled only with the feature `cuda`. Its plans and refusals are always compiled.
pub struct Mma;

impl AttentionEngine for Mma {
    type Forward = MmaForwardPlan;
    type Backward = MmaBackwardPlan;

    const MOST_QUANTIZED_ROWS: usize = DECODE_ROWS;

    fn goes_first(problem: &AttentionProblem, pass: Pass) -> bool {
        let rows = problem.q_len * problem.group().max(1);
        pass == Pass::Forward && rows <= plan::FIRST_ROWS
    }

    fn plan_forward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<MmaForwardPlan, Refusal> {
        plan::forward(problem, device, layouts, false)
    }

    fn plan_forward_as_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<MmaForwardPlan, Refusal> {
        plan::forward(problem, device, layouts, true)
    }

    fn plan_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<MmaBackwardPlan, Refusal> {
        plan::backward(problem, device, layouts)
    }

    fn splits(plan: &MmaForwardPlan) -> usize {
        plan.splits
    }

    fn reads_pages(plan: &MmaForwardPlan, page_len: usize) -> bool {
        let is_copied = plan.copies.key || plan.copies.value;
        plan.tiles.reads_pages(page_len) && !is_copied
    }

    fn warnings(problem: &AttentionProblem, _plan: &MmaBackwardPlan) -> Vec<Warning> {
        let in_f16 = problem.dtype == DType::F16;
        Vec::from_iter(in_f16.then_some(Warning::ScoreGradientsInF16))
    }
}

#[cfg(feature = "cuda")]
impl Launch for Mma {
    fn forward(
        plan: MmaForwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        let inputs = aligned_inputs(inputs, plan.copies);
        launch::forward(inputs, None, problem, plan)
    }

    fn forward_quantized(
        plan: MmaForwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        scales: RowScales,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        let inputs = aligned_inputs(inputs, plan.copies);
        launch::forward(inputs, Some(scales), problem, plan)
    }

    fn backward(
        plan: MmaBackwardPlan,
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
