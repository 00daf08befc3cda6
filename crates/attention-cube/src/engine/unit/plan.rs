//! The unit engine's plan: tiles from tables, by the width of the output and the device's shared memory.

mod tables;

use self::tables::{DECODE, DOUBLE, TOGETHER};
use crate::AttentionProblem;
use crate::device::DeviceProfile;
use crate::passes::bias_gradient::plan::BiasGradientPlan;
use crate::select::{Layouts, Pass, Refusal};
use crate::tile::table::{SINGLE, choose};
use crate::tile::tiles::UnitTiles;
use crate::tiled::plan::{BackwardPlan, ForwardPlan, Packing, backward_by, check, forward_by};

/// Parts of the query's gradient up to which they are worth their memory.
const MAX_PARTS: usize = 4;

/// The kernel of the forward of `problem`, or why there is none.
pub(super) fn forward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<ForwardPlan, Refusal> {
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

/// The kernels of the backward of `problem`, or why there are none.
pub(super) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<BackwardPlan, Refusal> {
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
        BackwardPlan {
            query,
            key_value,
            parts,
            bias: BiasGradientPlan::new(problem, device, vector)?,
        },
    )
}

/// Parts of the query's gradient where one kernel gives all three: as many as keep a software driver's
/// processors busy, if those are few, or fewer, so that the gradients fit one buffer; none where nothing fits.
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
