//! Which kernel serves a problem on a device, and why the faster ones do not.

use crate::backend::check_backend;
use crate::device::DeviceProfile;
use crate::engine::Kernel;
use crate::select::{Layouts, Pass, Selection, select};
use crate::{AttentionError, AttentionProblem};
use burn::tensor::Device;
use std::fmt;

/// The answer of [`explain`]; `Display` puts it in a few lines.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The device's runtime and limits; `None` where it runs no CubeCL kernels.
    pub device: Option<DeviceProfile>,
    /// The error that every call gets there, where the device is of a backend without attention: then nothing else here
    /// is of any use.
    pub error: Option<AttentionError>,
    /// The choice for the forward.
    pub forward: Selection,
    /// The choice for the backward.
    pub backward: Selection,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(error) = &self.error {
            return writeln!(f, "{error}");
        }
        match &self.device {
            Some(device) => writeln!(f, "device: {}", device.name)?,
            None => writeln!(f, "device: no CubeCL")?,
        }
        for (pass, selection) in [("forward", &self.forward), ("backward", &self.backward)] {
            match &selection.kernel {
                Kernel::Forward(kernel) => writeln!(f, "{pass}: {kernel:?}")?,
                Kernel::Backward(kernel) => writeln!(f, "{pass}: {kernel:?}")?,
            }
            for (engine, reason) in &selection.refusals {
                writeln!(f, "  {engine:?} refused: {reason}")?;
            }
            for warning in &selection.warnings {
                writeln!(f, "  warning: {warning}")?;
            }
        }
        Ok(())
    }
}

/// Which kernel would serve `problem` on `device`, for contiguous inputs, and why the
/// faster ones refuse. The same choice is logged at debug level with every call.
///
/// ```
/// use attention_cube::{AttentionOptions, AttentionProblem, explain};
/// use burn::tensor::{Device, Tensor};
///
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let q = Tensor::<4>::zeros([1, 8, 16, 512], &device);
/// let k = Tensor::<4>::zeros([1, 1, 16, 512], &device);
/// let problem = AttentionProblem::new(&q, &k, &k, &AttentionOptions::new().scale(1.0))?;
/// println!("{}", explain(&problem, &device));
/// # }
/// # Ok::<(), attention_cube::AttentionError>(())
/// ```
pub fn explain(problem: &AttentionProblem, device: &Device) -> Explanation {
    let profile = profile(device);
    let layouts = Layouts::contiguous(problem);
    let choose = |pass| select(problem, profile.as_ref(), layouts, pass);
    let (forward, backward) = (choose(Pass::Forward), choose(Pass::Backward));
    Explanation {
        device: profile,
        error: check_backend(device).err(),
        forward,
        backward,
    }
}

#[cfg(feature = "cube")]
fn profile(device: &Device) -> Option<DeviceProfile> {
    DeviceProfile::of_device(device)
}

#[cfg(not(feature = "cube"))]
fn profile(_device: &Device) -> Option<DeviceProfile> {
    None
}
