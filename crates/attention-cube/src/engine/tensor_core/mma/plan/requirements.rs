//! The requirements of the `mma` engine on the problem and the device.

use crate::engine::tiling::check_sizes;
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::{Feature, Refusal};
use cube_kit::nvidia::Half;

/// Checks that the engine supports the problem and the device. Returns the half precision type of the problem's
/// operands.
///
/// # Errors
/// Returns the reason why the engine refuses the problem or the device.
pub(super) fn check(problem: &AttentionProblem, device: &DeviceProfile) -> Result<Half, Refusal> {
    let half = Half::of(problem.dtype).ok_or(Refusal::NotHalf(problem.dtype))?;
    device.require(Feature::CopyAsync)?;
    device.require(Feature::Mma(problem.dtype))?;
    device.require(Feature::LoadMatrix(problem.dtype))?;
    check_sizes(problem)?;
    Ok(half)
}
