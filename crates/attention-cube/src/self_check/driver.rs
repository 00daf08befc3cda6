//! The identity of a device and its driver, as far as the runtime and the system report them.

use cubecl::client::Client;
use serde::{Deserialize, Serialize};
use std::fs;

/// The properties for which a verdict holds. A verdict of another identity counts for nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    /// The runtime, such as `wgpu<spirv>`.
    pub runtime: String,
    /// The name of the device.
    pub device: String,
    /// CubeCL's name of the target that kernels are compiled for.
    pub target: String,
    /// The name and the version of the driver. Empty if neither the runtime nor the system reports them.
    pub driver: String,
    /// The version of the operating system's kernel, which has parts of many drivers.
    pub system: String,
    /// The version of this crate.
    pub attention_cube: String,
}

/// Returns the identity of a client's device. `runtime` is the runtime's name.
pub(super) fn identity(runtime: &str, client: &Client) -> Identity {
    let identity = &client.properties().identity;
    Identity {
        runtime: runtime.to_string(),
        device: identity.name.clone(),
        target: identity.fingerprint.clone(),
        driver: driver(runtime, &identity.name),
        system: system(),
        attention_cube: env!("CARGO_PKG_VERSION").to_string(),
    }
}

/// Returns the name and the version of the driver.
fn driver(runtime: &str, device: &str) -> String {
    if let Some(driver) = adapter_driver(runtime, device) {
        return driver;
    }
    let path = match runtime {
        "cuda" => "/proc/driver/nvidia/version",
        _ => "/opt/rocm/.info/version",
    };
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_string()
}

/// Returns the version of the operating system's kernel on Linux, or of macOS. Windows' drivers have versions of their
/// own, so the function returns an empty text there.
fn system() -> String {
    let linux = fs::read_to_string("/proc/sys/kernel/osrelease");
    let macos = || fs::read_to_string("/System/Library/CoreServices/SystemVersion.plist");
    linux
        .or_else(|_| macos())
        .unwrap_or_default()
        .trim()
        .to_string()
}

/// Returns the driver of wgpu's adapters with the device's name. Two cards of one name have one driver.
#[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal"))]
fn adapter_driver(runtime: &str, device: &str) -> Option<String> {
    use cubecl::future::block_on;
    use cubecl_wgpu::wgpu::{Backends, Instance, InstanceDescriptor};
    use std::sync::OnceLock;

    /// The instance that lists the adapters. It is never dropped, because Vulkan's loader crashes if threads create
    /// and drop instances at the same time.
    static INSTANCE: OnceLock<Instance> = OnceLock::new();
    let backends = match runtime {
        "wgpu<spirv>" => Backends::VULKAN,
        "wgpu<msl>" => Backends::METAL,
        "wgpu<wgsl>" => Backends::PRIMARY,
        _ => return None,
    };
    let instance = INSTANCE.get_or_init(|| {
        Instance::new(InstanceDescriptor {
            backends,
            ..InstanceDescriptor::new_without_display_handle()
        })
    });
    let adapters = block_on(instance.enumerate_adapters(backends));
    let infos = adapters.iter().map(|adapter| adapter.get_info());
    let mut drivers: Vec<_> = infos
        .filter(|info| info.name == device)
        .map(|info| format!("{} {}", info.driver, info.driver_info))
        .collect();
    drivers.sort_unstable();
    drivers.dedup();
    Some(drivers.join(", ").trim().to_string())
}

#[cfg(not(any(feature = "wgpu", feature = "vulkan", feature = "metal")))]
fn adapter_driver(_runtime: &str, _device: &str) -> Option<String> {
    None
}
