//! The plan of the unit engine. It chooses tiles from tables, by the width of the output and the device's shared memory.

mod tables;

use self::tables::{DECODE, DOUBLE, TOGETHER};
use crate::engine::bias_gradient::plan::BiasGradientPlan;
use crate::engine::portable::common::plan::{
    Packing, PortableBackwardPlan, PortableForwardPlan, backward_by, check, forward_by,
};
use crate::engine::table_gradient::plan::TableGradientPlan;
use crate::problem::AttentionProblem;
use crate::tile_ops::table::{SINGLE, choose};
use crate::tile_ops::tiles::UnitTiles;
use crate::types::device::DeviceProfile;
use crate::types::refusal::Refusal;
use crate::types::request::{Layouts, Pass};

/// The largest number of partial gradients of the query, if one kernel computes all gradients. This kernel saves time,
/// but each partial gradient takes memory. With a larger number, the saved time would not be worth the memory.
const MAX_PARTS: usize = 4;

/// Plans the forward of `problem`, or returns the reason for a refusal.
pub(super) fn forward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<PortableForwardPlan, Refusal> {
    check(problem, device, Pass::Forward)?;
    let vector = layouts.vector(problem);
    let width = problem.value_dim;
    forward_by(
        problem,
        device,
        |rows| choose(DECODE, width, rows, device, vector),
        || choose(SINGLE, width, 0, device, vector),
    )
}

/// Plans the backward of `problem`, or returns the reason for a refusal.
pub(super) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<PortableBackwardPlan, Refusal> {
    check(problem, device, Pass::Backward)?;
    let vector = layouts.vector(problem);
    let width = problem.head_dim.max(problem.value_dim);
    let query = choose(SINGLE, problem.head_dim, 0, device, vector)?;
    let together = choose(TOGETHER, width, 0, device, vector).ok();
    let parts = together.and_then(|tiles| parts(problem, device, &tiles));
    let key_value = match together.filter(|_| parts.is_some()) {
        Some(tiles) => tiles,
        None => choose(DOUBLE, width, 0, device, vector)?,
    };
    backward_by(
        problem,
        device,
        PortableBackwardPlan {
            query,
            key_value,
            parts,
            bias: BiasGradientPlan::new(problem, device, vector)?,
            table: TableGradientPlan::new(problem, device, vector)?,
        },
    )
}

/// Returns the number of the query's partial gradients if one kernel computes all gradients. Otherwise returns `None`.
///
/// Several cubes can share a KV head only if each cube has its own partial gradient. With several partial gradients, a
/// software driver can therefore use all cores of the CPU. The result is `None` for a GPU. For a software driver, the
/// result is `None` if more than [`MAX_PARTS`] partial gradients are needed. The result is also `None` if the buffers
/// exceed the device's largest buffer even with one partial gradient.
fn parts(problem: &AttentionProblem, device: &DeviceProfile, tiles: &UnitTiles) -> Option<usize> {
    let heads = (problem.batch * problem.kv_heads).max(1);
    let parts = device.processors?.div_ceil(heads);
    let key_tiles = problem.kv_len.div_ceil(tiles.rows).max(1);
    if parts > MAX_PARTS {
        return None;
    }
    (1..=parts.min(key_tiles))
        .rev()
        .find(|parts| Packing::new(problem, *parts).fits(device))
}
