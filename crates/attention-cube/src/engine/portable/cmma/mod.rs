//! The cmma engine: the kernels of `common`, with GEMMs in matrix fragments of `cubecl::cmma`. `cubecl::cmma` supports the
//! matrix units of most GPUs on Vulkan, Metal and HIP, and of NVIDIA GPUs older than Ampere.
//!
//! A device's fragments serve in tiles that passed the self-check of the module `self_check`. The planner returns
//! [`Refusal::Unchecked`] for other tiles. A backward also needs the forward's verdict, because the backward recomputes
//! P from the LSE of a forward that sums the scores in the same order.

pub mod plan;

use crate::engine::api::AttentionEngine;
use crate::engine::api::DECODE_ROWS;
#[cfg(feature = "cube")]
use crate::engine::api::{Launch, RowScales};
#[cfg(feature = "cube")]
use crate::engine::portable::common::launch;
use crate::engine::portable::common::plan::{PortableBackwardPlan, PortableForwardPlan};
use crate::problem::AttentionProblem;
use crate::tile_ops::tiles::UnitTiles;
use crate::types::device::DeviceProfile;
use crate::types::fragment_verdict::TileCheck;
use crate::types::refusal::{Refusal, Warning};
#[cfg(feature = "cube")]
use crate::types::request::BackwardRequest;
use crate::types::request::{Layouts, Pass};
#[cfg(feature = "cube")]
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;

/// Returns the self-check that covers the tiles of a pass.
fn tile_check(problem: &AttentionProblem, pass: Pass, tiles: &[UnitTiles]) -> TileCheck {
    let tiles = Vec::from_iter(tiles.iter().map(UnitTiles::to_string));
    TileCheck {
        pass,
        dtype: problem.dtype,
        tiles: tiles.join("; "),
    }
}

/// Returns the self-check that covers a plan of a backward.
pub(crate) fn backward_check(problem: &AttentionProblem, plan: &PortableBackwardPlan) -> TileCheck {
    tile_check(problem, Pass::Backward, &[plan.query, plan.key_value])
}

/// Returns the self-check that covers a plan of a forward.
pub(crate) fn forward_check(problem: &AttentionProblem, plan: &PortableForwardPlan) -> TileCheck {
    tile_check(problem, Pass::Forward, &[plan.tiles])
}

/// Returns a refusal if some tiles failed the self-check of the device, or have not passed it yet.
fn require_verdict(
    device: &DeviceProfile,
    check: impl FnOnce() -> TileCheck,
) -> Result<(), Refusal> {
    match &device.fragments.verdicts {
        Some(verdicts) => verdicts.require(check()),
        None => Ok(()),
    }
}

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
        let plan = plan::forward(problem, device, layouts)?;
        require_verdict(device, || forward_check(problem, &plan))?;
        Ok(plan)
    }

    fn plan_backward(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
    ) -> Result<PortableBackwardPlan, Refusal> {
        let plan = plan::backward(problem, device, layouts)?;
        // The forward may read its operands in vectors although the backward, which has more operands, cannot.
        let in_vectors = Layouts {
            vectors: true,
            ..layouts
        };
        for layouts in [layouts, in_vectors] {
            if let Ok(forward) = plan::forward(problem, device, layouts) {
                require_verdict(device, || forward_check(problem, &forward))?;
            }
        }
        require_verdict(device, || backward_check(problem, &plan))?;
        Ok(plan)
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
