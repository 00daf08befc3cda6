//! The argument `--device`: a name for each backend, and the search for the best device if no backend is named.

#![cfg_attr(
    not(feature = "cube"),
    allow(
        dead_code,
        unused_variables,
        reason = "without CubeCL there are no devices to list"
    )
)]

use crate::{Dtype, Error, terminal::note};
use burn::tensor::Device;
#[cfg(feature = "cube")]
use burn::{
    backend::{CubeDevice, DispatchDevice},
    tensor::DeviceType,
};
#[cfg(feature = "cube")]
use burn_gemma4::catch_panic;
use std::path::Path;

/// The values of `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceName {
    /// Use a GPU if the machine has a usable one, and the CPU otherwise.
    #[default]
    Auto,
    /// Use the best GPU that this build supports.
    Gpu,
    /// Use NVIDIA GPUs.
    Cuda,
    /// Use AMD GPUs through HIP.
    Rocm,
    /// Use Apple GPUs.
    Metal,
    /// Use any Vulkan driver, through SPIR-V.
    Vulkan,
    /// Use any GPU or software driver, through WGSL.
    Wgpu,
    /// Use the CPU, through Burn's Flex backend; `cpu` is an alias.
    #[value(alias = "cpu")]
    Flex,
}

/// A chosen device, with its description.
pub struct Chosen {
    /// The device.
    pub device: Device,
    /// A description of the device for the user.
    pub description: String,
    /// The backend of the device.
    pub name: DeviceName,
    /// The number of the device on its backend, if the user gave a number.
    pub number: Option<usize>,
    /// True if the device is a software driver, that is, if the CPU executes the device's work.
    pub software: bool,
}

impl Chosen {
    /// Returns the requested dtype. Without a request, returns f32 for a software driver and for a device without half
    /// precision. Otherwise returns half precision.
    ///
    /// # Errors
    /// Returns an error if the device does not support the requested dtype.
    pub fn dtype(&self, asked: Option<Dtype>) -> Result<Dtype, Error> {
        let computes = |dtype: &Dtype| self.device.supports_dtype(dtype.burn());
        match asked {
            Some(dtype) if computes(&dtype) => Ok(dtype),
            Some(dtype) => Err(format!("this device does not compute in {dtype}").into()),
            None if self.software => Ok(Dtype::F32),
            None => Ok([Dtype::Bf16, Dtype::F16]
                .into_iter()
                .find(computes)
                .unwrap_or(Dtype::F32)),
        }
    }

    /// True if the devices of this backend copy memory to one another directly. CUDA devices copy directly if NCCL is
    /// installed.
    pub fn has_transport(&self) -> bool {
        match self.device.as_dispatch() {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(device) => device.client().has_device_transport(),
            _ => false,
        }
    }
}

impl std::fmt::Display for Chosen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.label(), self.description)
    }
}

/// The order in which [`DeviceName::Auto`] looks for a GPU. The GPU vendors' own runtimes come first.
const GPUS: [DeviceName; 5] = [
    DeviceName::Cuda,
    DeviceName::Rocm,
    DeviceName::Metal,
    DeviceName::Vulkan,
    DeviceName::Wgpu,
];

/// Returns the best device of the backend `name`.
///
/// A software driver is chosen only if its backend is named, because the backend flex is faster than a software driver.
///
/// # Errors
/// Returns an error if this build lacks the backend's feature, or if the machine lacks such a device.
pub fn choose(name: DeviceName) -> Result<Chosen, Error> {
    choose_numbered(name, None)
}

/// Returns the device with the given number on the backend `name`, or the best device without a number. On the CPU,
/// every number means the CPU. No other device of the backend is opened, because an open device takes memory.
///
/// # Errors
/// Returns the errors of [`choose`], and an error if no device has the number.
pub fn choose_numbered(name: DeviceName, number: Option<usize>) -> Result<Chosen, Error> {
    #[cfg(all(feature = "persistence", feature = "cube"))]
    keep_kernels();
    let chosen = find(name, number)?;
    log::debug!("device {chosen}");
    Ok(chosen)
}

/// Returns the backends of this build, the GPU vendors' own runtimes first.
pub fn of_build() -> Vec<DeviceName> {
    let all = GPUS.into_iter().chain([DeviceName::Flex]);
    all.filter(|name| is_built(*name)).collect()
}

fn find(name: DeviceName, number: Option<usize>) -> Result<Chosen, Error> {
    if !matches!(name, DeviceName::Auto | DeviceName::Gpu) {
        return named(name, number, Drivers::All);
    }
    if !is_built(DeviceName::Cuda) && has_nvidia_driver() {
        note(
            "note: this machine has an NVIDIA driver, and this program was built without CUDA, which is fastest there: \
             build it with --features cuda",
        );
    }
    let mut absences = Vec::new();
    for gpu in GPUS.into_iter().filter(|name| is_built(*name)) {
        match named(gpu, number, Drivers::OfGpus) {
            Ok(chosen) => return Ok(chosen),
            Err(error) => {
                log_absence(&error);
                absences.push(error.to_string());
            }
        }
    }
    if name == DeviceName::Gpu {
        let found = match absences.is_empty() {
            true => "this program was built without a GPU feature".into(),
            false => absences.join("; "),
        };
        return Err(format!("--device gpu: {found}; expected a GPU, or --device cpu").into());
    }
    named(DeviceName::Flex, number, Drivers::All).map_err(|_| {
        "this machine has no GPU that this build can reach. Build with the feature `flex`, or name a \
         software driver with --device vulkan or --device wgpu"
            .into()
    })
}

/// True if NVIDIA's driver is installed. The check looks for files that exist while the driver runs.
pub(crate) fn has_nvidia_driver() -> bool {
    let traces = [
        "/proc/driver/nvidia/version",
        r"C:\Windows\System32\nvcuda.dll",
    ];
    traces.iter().any(|trace| Path::new(trace).exists())
}

/// Enables CubeCL's cache of compiled kernels, in addition to the settings of a `cubecl.toml`. The cache identifies
/// each kernel by its source code, so a changed kernel is compiled again.
#[cfg(all(feature = "persistence", feature = "cube"))]
fn keep_kernels() {
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    // The result is ignored. The call fails only if the configuration is set already, because a device was chosen before.
    CubeClRuntimeConfig::try_set(config);
}

/// Returns the devices with the given numbers, on the backend of the chosen device. On the CPU, every number means the
/// CPU.
///
/// # Errors
/// Returns an error if no device has one of the numbers.
pub fn several(chosen: &Chosen, numbers: &[usize]) -> Result<Vec<Device>, Error> {
    if chosen.name == DeviceName::Flex {
        return Ok(vec![chosen.device.clone(); numbers.len()]);
    }
    let listed = numbered(chosen.name);
    let one = |number: &usize| pick(chosen.name, &listed, Some(*number));
    numbers.iter().map(one).collect()
}

/// Returns the number of devices on the backend of the chosen device. The CPU counts as one device.
pub fn count(chosen: &Chosen) -> usize {
    match chosen.name {
        DeviceName::Flex => 1,
        name => numbered(name).len(),
    }
}

/// Lists all devices of a backend, in the order of the driver.
fn numbered(name: DeviceName) -> Vec<Device> {
    #[cfg(feature = "cube")]
    {
        let kind = match name {
            #[cfg(feature = "cuda")]
            DeviceName::Cuda => DeviceType::Cuda,
            #[cfg(feature = "rocm")]
            DeviceName::Rocm => DeviceType::Rocm,
            #[cfg(feature = "metal")]
            DeviceName::Metal => DeviceType::Metal,
            #[cfg(feature = "vulkan")]
            DeviceName::Vulkan => DeviceType::Vulkan,
            #[cfg(feature = "wgpu")]
            DeviceName::Wgpu => DeviceType::Wgpu,
            _ => return Vec::new(),
        };
        Device::enumerate(kind).into_iter().collect()
    }
    #[cfg(not(feature = "cube"))]
    Vec::new()
}

/// The drivers that a search includes: all drivers, or only drivers of GPUs, without software drivers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Drivers {
    All,
    OfGpus,
}

/// Prints a note about a GPU that does not work. An absent GPU is not reported.
fn log_absence(error: &Error) {
    if error.downcast_ref::<Unusable>().is_some() {
        note(format_args!("note: {error}"));
    }
}

/// The error for a device that the driver lists but that cannot be opened.
#[derive(Debug)]
struct Unusable {
    name: &'static str,
    reason: String,
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} lists a device that does not open: {}",
            self.name, self.reason
        )
    }
}

impl std::error::Error for Unusable {}

impl DeviceName {
    /// Returns the name on the command line. The name of a backend is also the name of the backend's Cargo feature.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Gpu => "gpu",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Metal => "metal",
            Self::Vulkan => "vulkan",
            Self::Wgpu => "wgpu",
            Self::Flex => "flex",
        }
    }
}

pub(crate) fn is_built(name: DeviceName) -> bool {
    match name {
        DeviceName::Auto | DeviceName::Gpu => true,
        DeviceName::Cuda => cfg!(feature = "cuda"),
        DeviceName::Rocm => cfg!(feature = "rocm"),
        DeviceName::Metal => cfg!(feature = "metal"),
        DeviceName::Vulkan => cfg!(feature = "vulkan"),
        DeviceName::Wgpu => cfg!(feature = "wgpu"),
        DeviceName::Flex => cfg!(feature = "flex"),
    }
}

fn named(name: DeviceName, number: Option<usize>, drivers: Drivers) -> Result<Chosen, Error> {
    if !is_built(name) {
        let feature = name.as_str();
        return Err(format!(
            "this program was built without {feature}: build it with --features {feature}"
        )
        .into());
    }
    match name {
        #[cfg(feature = "flex")]
        DeviceName::Flex => Ok(Chosen {
            device: Device::flex(),
            description: "this machine's processor".into(),
            name,
            number,
            software: true,
        }),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => listed(name, DeviceType::Cuda, number, drivers),
        #[cfg(feature = "rocm")]
        DeviceName::Rocm => listed(name, DeviceType::Rocm, number, drivers),
        #[cfg(feature = "metal")]
        DeviceName::Metal => listed(name, DeviceType::Metal, number, drivers),
        #[cfg(feature = "vulkan")]
        DeviceName::Vulkan => listed(name, DeviceType::Vulkan, number, drivers),
        #[cfg(feature = "wgpu")]
        DeviceName::Wgpu => listed(name, DeviceType::Wgpu, number, drivers),
        #[allow(
            unreachable_patterns,
            reason = "with every feature, only `auto` and `gpu` are left"
        )]
        _ => Err("no device has this name".into()),
    }
}

/// Returns the device with the given number among those that a runtime lists, or the best device without a number.
/// Listing opens no device, and does not panic if the driver is missing.
#[cfg(feature = "cube")]
fn listed(
    name: DeviceName,
    kind: DeviceType,
    number: Option<usize>,
    drivers: Drivers,
) -> Result<Chosen, Error> {
    let word = name.as_str();
    let listed = catch_panic(|| Device::enumerate(kind).into_iter().collect::<Vec<_>>())
        .map_err(|reason| Unusable { name: word, reason })?;
    let device = pick(name, &listed, number)?;
    let software = rank(&device) == SOFTWARE;
    if software && drivers == Drivers::OfGpus {
        return Err(format!("{word} finds only a software driver").into());
    }
    if software && name == DeviceName::Vulkan {
        note(
            "note: Mesa's software driver is known to crash on kernels in SPIR-V; --device wgpu uses WGSL instead",
        );
    }
    let description = describe(&device, name)?;
    Ok(Chosen {
        software,
        device,
        description,
        name,
        number,
    })
}

/// Returns the device with the given number, or the best device without a number.
fn pick(name: DeviceName, listed: &[Device], number: Option<usize>) -> Result<Device, Error> {
    let (word, count) = (name.as_str(), listed.len());
    let device = match number {
        Some(number) => listed.get(number),
        #[cfg(feature = "cube")]
        None => listed.iter().min_by_key(|device| rank(device)),
        #[cfg(not(feature = "cube"))]
        None => listed.first(),
    };
    device.cloned().ok_or_else(|| match number {
        Some(number) if count > 0 => {
            format!("{word} has {count} devices; no device has the number {number}").into()
        }
        _ => format!("{word} finds no device on this machine").into(),
    })
}

/// Opens a device, and returns the name that its driver gives it.
#[cfg(feature = "cube")]
fn describe(device: &Device, name: DeviceName) -> Result<String, Error> {
    let name = name.as_str();
    let identity = catch_panic(|| device.identity()).map_err(|reason| Unusable { name, reason })?;
    Ok(identity.map_or_else(|| "unnamed".into(), |identity| identity.name))
}

/// The rank of a software driver in the order of preference.
#[cfg(feature = "cube")]
const SOFTWARE: usize = 4;

/// Returns the rank of a device in the order of preference, from 0, the most preferred. Discrete GPUs come first, and
/// software drivers last.
#[cfg(feature = "cube")]
fn rank(device: &Device) -> usize {
    match device.as_dispatch() {
        #[cfg(any(feature = "wgpu", feature = "vulkan", feature = "metal"))]
        DispatchDevice::Cube(CubeDevice::Wgpu(device)) => {
            use burn::backend::WgpuDeviceKind as Kind;
            match device.kind {
                Kind::DiscreteGpu(_) => 0,
                Kind::IntegratedGpu(_) => 1,
                Kind::VirtualGpu(_) => 2,
                Kind::Cpu => SOFTWARE,
                _ => 3,
            }
        }
        DispatchDevice::Cube(CubeDevice::Cpu(_)) => SOFTWARE,
        _ => 0,
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn pick_of_a_missing_number_gives_the_number_of_devices() {
        let listed = [Device::flex(), Device::flex()];
        assert!(pick(DeviceName::Cuda, &listed, Some(1)).is_ok());
        for (listed, number, text) in [
            (
                &listed[..],
                2,
                "cuda has 2 devices; no device has the number 2",
            ),
            (&[], 0, "cuda finds no device on this machine"),
        ] {
            let error = pick(DeviceName::Cuda, listed, Some(number)).err();
            assert_eq!(error.expect(text).to_string(), text);
        }
    }
}
