//! The cmma engine: the kernels of `common`, with GEMMs in matrix fragments of `cubecl::cmma`. `cubecl::cmma` supports the
//! matrix units of most GPUs on Vulkan, Metal and HIP, and of NVIDIA GPUs older than Ampere.

pub mod plan;

use crate::engine::api::AttentionEngine;
use crate::engine::api::DECODE_ROWS;
#[cfg(feature = "cube")]
use crate::engine::api::{Launch, RowScales};
#[cfg(feature = "cube")]
use crate::engine::portable::common::launch;
use crate::engine::portable::common::plan::{PortableBackwardPlan, PortableForwardPlan};
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::{Refusal, Warning};
#[cfg(feature = "cube")]
use crate::types::request::BackwardRequest;
use crate::types::request::Layouts;
#[cfg(feature = "cube")]
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;

/// The cmma engine. It runs on devices that support `cubecl::cmma` fragments in half precision or f32.
pub struct Cmma;

impl AttentionEngine for Cmma {
    type Forward = PortableForwardPlan;
    type Backward = PortableBackwardPlan;

    const MOST_QUANTIZED_ROWS: usize = DECODE_ROWS;

    fn plan_forward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<PortableForwardPlan, Refusal> {
        plan::forward(problem, device, layouts)
    }

    fn plan_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<PortableBackwardPlan, Refusal> {
        plan::backward(problem, device, layouts)
    }

    fn splits(plan: &PortableForwardPlan) -> usize {
        plan.splits
    }

    fn reads_pages(plan: &PortableForwardPlan, page_len: usize) -> bool {
        page_len.is_multiple_of(plan.tiles.columns())
    }

    fn warnings(_problem: &AttentionProblem, plan: &PortableBackwardPlan) -> Vec<Warning> {
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
        plan: PortableForwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        launch::forward::launch(inputs, None, problem, plan)
    }

    fn forward_quantized(
        plan: PortableForwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        scales: RowScales,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        launch::forward::launch_quantized(inputs, scales, problem, plan)
    }

    fn backward(
        plan: PortableBackwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        saved: AttentionSaved<CubeBackend>,
        problem: &AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<CubeBackend> {
        launch::backward::launch(inputs, saved, problem, plan, request)
    }
}
