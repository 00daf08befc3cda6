//! The devices under test.

use attention_cube::{AttentionOptions, AttentionProblem, explain};
use burn::tensor::{DType, Device, Tensor};
use std::env;

/// A device under test, with the name of its Cargo feature.
#[derive(Clone)]
pub struct TestDevice {
    /// The name of the Cargo feature.
    pub name: &'static str,
    /// The device that the Cargo feature enables.
    pub device: Device,
}

impl TestDevice {
    /// True if the device runs CubeCL kernels.
    pub fn is_cube(&self) -> bool {
        self.name != "flex"
    }

    /// True if the device supports attention in `dtype`.
    pub fn supports(&self, dtype: DType) -> bool {
        serves(&self.device, dtype)
    }

    /// True if the device supports models in `dtype`. Otherwise prints a note that names the device and the dtype.
    pub fn computes_in(&self, dtype: DType) -> bool {
        let computes = self.device.supports_dtype(dtype) && self.supports(dtype);
        if !computes {
            println!("{} does not compute in {}", self.name, dtype.name());
        }
        computes
    }
}

/// True if `device` supports attention in `dtype`.
pub fn serves(device: &Device, dtype: DType) -> bool {
    let tensor = Tensor::<4>::zeros([1; 4], (device, DType::F32));
    let problem = AttentionProblem::new(&tensor, &tensor, &tensor, &AttentionOptions::new())
        .expect("a problem of size 1 is valid");
    match explain(&problem, device).device {
        Some(profile) => profile.dtypes.contains(&dtype),
        None => true,
    }
}

type Constructor = fn() -> Device;

/// The constructors of the devices that this build supports, each with the name of its Cargo feature.
const COMPILED: &[(&str, Constructor)] = &[
    ("flex", Device::flex),
    #[cfg(feature = "cuda")]
    ("cuda", || Device::cuda(0)),
    #[cfg(feature = "rocm")]
    ("rocm", || Device::rocm(0)),
    #[cfg(feature = "metal")]
    ("metal", || {
        Device::metal(burn::tensor::DeviceKind::DefaultDevice)
    }),
    #[cfg(feature = "vulkan")]
    ("vulkan", || {
        Device::vulkan(burn::tensor::DeviceKind::DefaultDevice)
    }),
    #[cfg(all(feature = "wgpu", not(feature = "vulkan")))]
    ("wgpu", || {
        Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)
    }),
];

/// Returns the devices of this build that the environment variable `ATTENTION_TEST_DEVICES` lists. Without the
/// variable, returns all devices of this build.
///
/// # Panics
/// Panics if the variable lists a device that this build does not have.
pub fn devices() -> Vec<TestDevice> {
    let wanted = env::var("ATTENTION_TEST_DEVICES").ok();
    let wanted: Option<Vec<&str>> = wanted
        .as_deref()
        .map(|names| names.split(',').map(str::trim).collect());
    for name in wanted.iter().flatten() {
        assert!(
            COMPILED.iter().any(|(compiled, _)| compiled == name),
            "ATTENTION_TEST_DEVICES names {name:?}, but this build has {:?}",
            COMPILED
                .iter()
                .map(|(compiled, _)| *compiled)
                .collect::<Vec<_>>(),
        );
    }
    COMPILED
        .iter()
        .filter(|(name, _)| wanted.as_ref().is_none_or(|wanted| wanted.contains(name)))
        .map(|(name, construct)| TestDevice {
            name,
            device: construct(),
        })
        .collect()
}

/// Returns the devices that run CubeCL kernels.
pub fn cube_devices() -> Vec<TestDevice> {
    devices().into_iter().filter(TestDevice::is_cube).collect()
}
