//! The devices that unit tests run on.

use burn::{backend::DispatchDevice, tensor::Device};
use burn_cubecl::CubeDevice;
use std::env;

/// Returns a device that runs CubeCL kernels: the first device named in `ATTENTION_TEST_DEVICES`, or the default device.
pub(crate) fn device() -> Device {
    let named = env::var("ATTENTION_TEST_DEVICES").unwrap_or_default();
    let named = named.split(',').find_map(|name| match name.trim() {
        #[cfg(feature = "wgpu")]
        "wgpu" => Some(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
        #[cfg(feature = "cuda")]
        "cuda" => Some(Device::cuda(0)),
        _ => None,
    });
    named.unwrap_or_default()
}

/// Returns CubeCL's handle of the test device.
///
/// # Panics
/// Panics if the default device runs no CubeCL kernels.
pub(crate) fn cube_device() -> CubeDevice {
    let device = device();
    match device.as_dispatch() {
        DispatchDevice::Cube(device) => device.clone(),
        #[allow(
            unreachable_patterns,
            reason = "without other backends it is the only device"
        )]
        _ => panic!("{device:?} runs no CubeCL kernels"),
    }
}
