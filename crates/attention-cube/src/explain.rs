//! Reports which kernel serves a problem on a device, and why the kernels that selection tries earlier refuse the
//! problem.

use crate::backend::check_backend;
#[cfg(feature = "cube")]
use crate::device::cube_device;
use crate::engine::Kernel;
use crate::error::AttentionError;
use crate::problem::AttentionProblem;
use crate::select::{Selection, select};
#[cfg(feature = "cube")]
use crate::self_check::select_checked;
use crate::types::device::DeviceProfile;
use crate::types::request::{Layouts, Pass};
use burn::tensor::Device;
use std::fmt;

/// The report that [`explain`] returns. `Display` prints it in a few lines.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// The device's runtime and limits, or `None` if the device runs no CubeCL kernels.
    pub device: Option<DeviceProfile>,
    /// The error that every attention call on this device returns, or `None` if calls work. If there is an error, all
    /// other fields have no meaning.
    pub error: Option<AttentionError>,
    /// The kernel choice for the forward pass.
    pub forward: Selection,
    /// The kernel choice for the backward pass.
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
            if selection.copies_pages {
                writeln!(f, "  pages are first copied to contiguous keys and values")?;
            }
        }
        if let Some(device) = &self.device {
            for line in device.fragments.verdict_lines() {
                writeln!(f, "{line}")?;
            }
        }
        Ok(())
    }
}

/// Reports which kernel would serve `problem` on `device` if all inputs were contiguous. Also reports why the kernels
/// that selection tries earlier refuse the problem.
///
/// Every attention call also logs its kernel choice at debug level.
///
/// On a device whose matrix units serve only after a self-check (the engine [`Cmma`](crate::Engine::Cmma)), this
/// function runs the check that the first call would run. A check should take about a second, and its verdict stays on
/// disk.
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
    let error = check_backend(device).err();
    #[cfg(feature = "cube")]
    if let Some(cube) = cube_device(device) {
        let client = cube.client();
        let layouts = Layouts::contiguous(problem);
        let choose = |pass| {
            select_checked(&cube, &client, problem, layouts, |profile| {
                select(problem, Some(profile), layouts, pass)
            })
        };
        let (_, forward) = choose(Pass::Forward);
        let (profile, backward) = choose(Pass::Backward);
        return Explanation {
            device: Some(profile.as_ref().clone()),
            error,
            forward,
            backward,
        };
    }
    let choose = |pass| select(problem, None, Layouts::contiguous(problem), pass);
    Explanation {
        device: None,
        error,
        forward: choose(Pass::Forward),
        backward: choose(Pass::Backward),
    }
}
