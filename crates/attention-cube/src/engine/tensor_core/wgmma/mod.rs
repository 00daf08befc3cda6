//! The wgmma engine for NVIDIA's Hopper. Its kernels use TMA copies, mbarriers and warpgroup matrix instructions (wgmma).
//!
//! Terms that recur in the kernels:
//! - *split-M*: each warpgroup of a CTA computes some rows of a tile, with all columns.
//! - *split-D*: each warpgroup computes all rows of a tile, with half of the columns.
//! - *ring*: buffers in shared memory (*stages*) through which blocks stream. Each stage has a *full* mbarrier (its
//!   data has arrived) and an *empty* mbarrier (all warps have read its data).
//! - *chunk*: in split-D, some rows or columns of a block, as many as fill one stage of the ring.
//! - *ping-pong*: the warpgroups take turns to issue wgmma, so that one warpgroup computes its softmax during another
//!   warpgroup's GEMMs.

#[cfg(feature = "cuda")]
pub(crate) mod backward;
#[cfg(feature = "cuda")]
pub(crate) mod chunked_gemm;
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

#[cfg(feature = "cuda")]
use crate::auxiliary::contiguous_copy::{aligned, aligned_inputs};
use crate::engine::api::AttentionEngine;
#[cfg(feature = "cuda")]
use crate::engine::api::Launch;
#[cfg(feature = "cuda")]
use crate::kernel_args::BROADCAST_QUERIES;
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::{Refusal, Warning};
#[cfg(feature = "cuda")]
use crate::types::request::BackwardRequest;
use crate::types::request::Layouts;
#[cfg(feature = "cuda")]
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use burn::tensor::DType;
#[cfg(feature = "cuda")]
use burn_cubecl::CubeBackend;
use plan::{WgmmaBackwardPlan, WgmmaForwardPlan};

/// The wgmma engine. Its plans and refusals are always compiled. Its kernels are compiled only with the feature `cuda`.
pub struct Wgmma;

impl AttentionEngine for Wgmma {
    type Forward = WgmmaForwardPlan;
    type Backward = WgmmaBackwardPlan;

    fn plan_forward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<WgmmaForwardPlan, Refusal> {
        plan::forward(problem, device, layouts)
    }

    fn plan_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<WgmmaBackwardPlan, Refusal> {
        plan::backward(problem, device, layouts)
    }

    fn splits(plan: &WgmmaForwardPlan) -> usize {
        plan.splits
    }

    fn reads_pages(plan: &WgmmaForwardPlan, page_len: usize) -> bool {
        let is_copied = plan.copies.key || plan.copies.value;
        plan.tiles.reads_pages(page_len) && !is_copied
    }

    fn warnings(problem: &AttentionProblem, _plan: &WgmmaBackwardPlan) -> Vec<Warning> {
        let in_f16 = problem.dtype == DType::F16;
        Vec::from_iter(in_f16.then_some(Warning::ScoreGradientsInF16))
    }
}

#[cfg(feature = "cuda")]
impl Launch for Wgmma {
    fn forward(
        plan: WgmmaForwardPlan,
        inputs: AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
    ) -> AttentionOutput<CubeBackend> {
        let inputs = aligned_inputs(inputs, plan.copies);
        launch::forward::forward(inputs, problem, plan)
    }

    fn backward(
        plan: WgmmaBackwardPlan,
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
