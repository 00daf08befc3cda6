//! The tiles of the `mma` engine's backward: the gradients that each kernel computes, and the layout of a CTA's shared
//! memory.
//!
//! A tile of queries streams blocks of keys, and a tile of keys streams blocks of queries. Identifiers with *dot* or
//! `q_or_k` are about rows of Q or K, and the dot products of these rows are the scores. Identifiers with *value* or
//! `v_or_do` are about rows of V or dO, and the dot products of these rows are dP.

mod split_d;
mod split_m;
mod table;
mod tiles;

pub use self::split_d::{MmaGradientSplitDTiles, Resident};
pub use self::split_m::MmaGradientSplitMTiles;
pub(crate) use self::table::gradient_tiles;
pub use self::tiles::MmaGradientTiles;
use super::requirements::check;
use crate::engine::tiling::BackwardPlan;
use crate::math::lse_form::LogsumexpForm;
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::Refusal;
use crate::types::request::Layouts;

/// The kernels of the mma engine's backward.
pub type MmaBackwardPlan = BackwardPlan<MmaGradientTiles>;

/// Plans the backward of `problem`, or returns the reason for a refusal.
pub(crate) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<MmaBackwardPlan, Refusal> {
    let half = check(problem, device)?;
    let kernels = gradient_tiles(
        problem.head_dim,
        problem.value_dim,
        half,
        LogsumexpForm::of_problem(problem) == LogsumexpForm::Apart,
        device,
    )?;
    MmaBackwardPlan::new(problem, device, layouts, kernels)
}
