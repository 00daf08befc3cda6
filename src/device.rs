//! `--device`: a name for every way to reach a device, and the best one without a name.

#![cfg_attr(
    not(feature = "cube"),
    allow(
        dead_code,
        unused_variables,
        reason = "without CubeCL there is nothing to list"
    )
)]

#[cfg(feature = "cube")]
use crate::guarded;
use crate::{Dtype, Error, terminal::note};
use burn::tensor::Device;
#[cfg(feature = "cube")]
use burn::{
    backend::{CubeDevice, DispatchDevice},
    tensor::DeviceType,
};
use std::path::Path;

/// The values of `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceName {
    /// A GPU if there is one, else flex.
    #[default]
    Auto,
    /// The best GPU that this build reaches.
    Gpu,
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs through HIP.
    Rocm,
    /// Apple GPUs.
    Metal,
    /// Any Vulkan driver, through SPIR-V.
    Vulkan,
    /// Any GPU or software driver, through WGSL.
    Wgpu,
    /// This machine's processor, by Burn's Flex backend; `cpu` is the same.
    #[value(alias = "cpu")]
    Flex,
}

/// A device that was chosen.
pub struct Chosen {
    /// The device.
    pub device: Device,
    /// What it is, for people.
    pub description: String,
    /// The way it is reached.
    pub name: DeviceName,
    /// Whether a processor does its work.
    pub software: bool,
}

impl Chosen {
    /// The dtype asked for, or the one that suits the device: half precision on a GPU that computes in it.
    ///
    /// # Errors
    /// Where the device does not compute in the dtype asked for.
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

    /// Whether devices of this kind send one another what is in their memory: on CUDA, where NCCL is found.
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
        write!(f, "{}: {}", self.name.as_str(), self.description)
    }
}

/// The order in which [`DeviceName::Auto`] looks for a GPU: the driver's own runtime first.
const GPUS: [DeviceName; 5] = [
    DeviceName::Cuda,
    DeviceName::Rocm,
    DeviceName::Metal,
    DeviceName::Vulkan,
    DeviceName::Wgpu,
];

/// The device called `name`.
///
/// A software driver such as Mesa's lavapipe is taken only by name: flex is faster.
///
/// # Errors
/// Where this build has no such feature, or this machine no such device.
pub fn choose(name: DeviceName) -> Result<Chosen, Error> {
    #[cfg(all(feature = "persistence", feature = "cube"))]
    keep_kernels();
    let chosen = find(name)?;
    log::debug!("device {chosen}");
    Ok(chosen)
}

fn find(name: DeviceName) -> Result<Chosen, Error> {
    if !matches!(name, DeviceName::Auto | DeviceName::Gpu) {
        return named(name, Drivers::All);
    }
    if !is_built(DeviceName::Cuda) && has_nvidia_driver() {
        note(
            "note: this machine has an NVIDIA driver, and this program was built without CUDA, which is fastest there: \
             `cargo xtask llvm`, then build it with --features cuda",
        );
    }
    let mut absences = Vec::new();
    for gpu in GPUS.into_iter().filter(|name| is_built(*name)) {
        match named(gpu, Drivers::OfGpus) {
            Ok(chosen) => return Ok(chosen),
            Err(error) => {
                log_absence(&error);
                absences.push(error.to_string());
            }
        }
    }
    if name == DeviceName::Gpu {
        let found = match absences.is_empty() {
            true => "this program was built without a GPU's feature".into(),
            false => absences.join("; "),
        };
        return Err(format!("--device gpu: {found}; expected a GPU, or --device cpu").into());
    }
    named(DeviceName::Flex, Drivers::All).map_err(|_| {
        "this machine has no GPU that this build can reach. Build with the feature `flex`, or name a \
         software driver with --device vulkan or --device wgpu"
            .into()
    })
}

/// Whether NVIDIA's driver is there, by what it leaves where it runs.
fn has_nvidia_driver() -> bool {
    let traces = [
        "/proc/driver/nvidia/version",
        r"C:\Windows\System32\nvcuda.dll",
    ];
    traces.iter().any(|trace| Path::new(trace).exists())
}

/// Has CubeCL keep what it compiles, beside whatever else a `cubecl.toml` says. It finds a kernel of another build by
/// its source, so none is ever stale.
#[cfg(all(feature = "persistence", feature = "cube"))]
fn keep_kernels() {
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    // A second choice of a device finds it set.
    CubeClRuntimeConfig::try_set(config);
}

/// The devices with these numbers among those of the chosen one's kind. The processor is any number of them.
///
/// # Errors
/// Where there is none with a number.
pub fn several(chosen: &Chosen, numbers: &[usize]) -> Result<Vec<Device>, Error> {
    if chosen.name == DeviceName::Flex {
        return Ok(vec![chosen.device.clone(); numbers.len()]);
    }
    let listed = numbered(chosen.name);
    let one = |number: &usize| {
        listed.get(*number).cloned().ok_or_else(|| {
            let (name, count) = (chosen.name.as_str(), listed.len());
            format!("{name} has {count} devices, and none with the number {number}").into()
        })
    };
    numbers.iter().map(one).collect()
}

/// How many devices there are of the chosen one's kind. The processor counts as one.
pub fn count(chosen: &Chosen) -> usize {
    match chosen.name {
        DeviceName::Flex => 1,
        name => numbered(name).len(),
    }
}

/// All devices of a kind, in the order of the driver.
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

/// Which drivers count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Drivers {
    All,
    OfGpus,
}

/// A GPU that is there and does not work is worth a line; one that is absent is not.
fn log_absence(error: &Error) {
    if error.downcast_ref::<Unusable>().is_some() {
        note(format_args!("note: {error}"));
    }
}

/// A device that the driver lists and does not open.
#[derive(Debug)]
struct Unusable {
    name: &'static str,
    reason: String,
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} has a device, which does not open: {}",
            self.name, self.reason
        )
    }
}

impl std::error::Error for Unusable {}

impl DeviceName {
    /// The word on the command line, which is also the feature's name.
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

fn is_built(name: DeviceName) -> bool {
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

fn named(name: DeviceName, drivers: Drivers) -> Result<Chosen, Error> {
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
            software: true,
        }),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda => listed(name, DeviceType::Cuda, drivers),
        #[cfg(feature = "rocm")]
        DeviceName::Rocm => listed(name, DeviceType::Rocm, drivers),
        #[cfg(feature = "metal")]
        DeviceName::Metal => listed(name, DeviceType::Metal, drivers),
        #[cfg(feature = "vulkan")]
        DeviceName::Vulkan => listed(name, DeviceType::Vulkan, drivers),
        #[cfg(feature = "wgpu")]
        DeviceName::Wgpu => listed(name, DeviceType::Wgpu, drivers),
        #[allow(
            unreachable_patterns,
            reason = "with every feature, only `auto` and `gpu` are left"
        )]
        _ => Err("no device has this name".into()),
    }
}

/// The best device that a runtime lists. Listing opens nothing and does not panic without a driver.
#[cfg(feature = "cube")]
fn listed(name: DeviceName, kind: DeviceType, drivers: Drivers) -> Result<Chosen, Error> {
    let word = name.as_str();
    let device = guarded(|| Device::enumerate(kind).into_iter().min_by_key(rank))
        .map_err(|reason| Unusable { name: word, reason })?
        .ok_or_else(|| format!("{word} finds no device on this machine"))?;
    let software = rank(&device) == SOFTWARE;
    if software && drivers == Drivers::OfGpus {
        return Err(format!("{word} finds only a software driver").into());
    }
    if software && name == DeviceName::Vulkan {
        note(
            "note: Mesa's software driver is known to crash on kernels in SPIR-V; --device wgpu gives it WGSL",
        );
    }
    let identity = guarded(|| device.identity())
        .map_err(|reason| Unusable { name: word, reason })?
        .map_or_else(|| "unnamed".into(), |identity| identity.name);
    Ok(Chosen {
        software,
        device,
        description: identity,
        name,
    })
}

/// The rank of a driver that runs on the processor.
#[cfg(feature = "cube")]
const SOFTWARE: usize = 4;

/// Discrete GPUs first, software last.
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
