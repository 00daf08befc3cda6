//! Reads a device's profile from the properties that CubeCL reports.

#[cfg(feature = "cube")]
use crate::device::env_override::DeviceOverride;
pub use crate::types::device::{DeviceProfile, Emulation, FragmentSupport, Fragments};
#[cfg(feature = "cube")]
use crate::types::engine::Engine;
pub use crate::types::fragment_verdict::{FragmentVerdict, FragmentVerdicts, TileCheck};
pub use crate::types::refusal::Feature;
#[cfg(feature = "cube")]
use burn::{
    backend::cubecl::dtype_to_storage_type,
    tensor::{DType, Device},
};
#[cfg(feature = "cube")]
use burn_cubecl::{CubeDevice, tensor::CubeTensor};
#[cfg(feature = "cube")]
use cube_kit::hopper::is_hopper;
#[cfg(feature = "cube")]
use cubecl::client::Client;
#[cfg(feature = "cube")]
use cubecl::ir::features::{MmaConfig, Tma, TypeUsage};
#[cfg(feature = "cube")]
use cubecl::ir::{DeviceProperties, FloatKind, PciVendor};
#[cfg(feature = "cube")]
use std::{
    collections::HashMap,
    num::NonZero,
    path::PathBuf,
    sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError},
    thread::available_parallelism,
};

#[cfg(feature = "cube")]
impl DeviceProfile {
    /// Returns the profile of a device with a CubeCL runtime. The function queries each device only once per process.
    pub(crate) fn of_cube(device: &CubeDevice, client: impl FnOnce() -> Client) -> Arc<Self> {
        let mut profiles = PROFILES.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = || Arc::new(Self::of_client(&client()));
        Arc::clone(profiles.entry(device.clone()).or_insert_with(asked))
    }

    /// Returns the profile of a tensor's device.
    pub(crate) fn of_tensor(tensor: &CubeTensor) -> Arc<Self> {
        Self::of_cube(&tensor.device, || tensor.client.clone())
    }

    /// Adds a verdict of the self-check to the profile of a device, and returns the new profile. `file` is the file
    /// that keeps the verdict, if any.
    pub(crate) fn with_verdict(
        device: &CubeDevice,
        client: &Client,
        verdict: (TileCheck, FragmentVerdict),
        file: Option<PathBuf>,
    ) -> Arc<Self> {
        let mut profiles = PROFILES.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = || Arc::new(Self::of_client(client));
        let profile = profiles.entry(device.clone()).or_insert_with(asked);
        let verdicts = &mut Arc::make_mut(profile).fragments.verdicts;
        let verdicts = verdicts.get_or_insert_default();
        verdicts.known.push(verdict);
        verdicts.file = file.or(verdicts.file.take());
        Arc::clone(profile)
    }

    /// Reads the profile from the properties that a CubeCL client reports for its device.
    fn of_client(client: &Client) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let restriction = DeviceOverride::of_environment();
        let dtypes = [DType::F32, DType::F16, DType::BF16]
            .into_iter()
            .filter(|dtype| {
                let usage = properties.type_usage(dtype_to_storage_type(*dtype));
                usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
            })
            .collect();
        Self {
            name: client.name().to_string(),
            dtypes,
            shared_memory: restriction.shared_memory(hardware.max_shared_memory_size),
            units_per_cube: hardware.max_units_per_cube as usize,
            bindings: hardware.max_bindings as usize,
            largest_buffer: usize::try_from(properties.memory.max_page_size).unwrap_or(usize::MAX),
            cube_count: hardware.max_cube_count.0,
            // `processors` is `None` for a GPU. Runtimes report a physical device for every GPU. If a runtime reports
            // none, the device is a software driver on the CPU.
            processors: properties.identity.physical.is_none().then(processors),
            multiprocessors: hardware
                .num_streaming_multiprocessors
                .map(|count| count as usize),
            features: features(properties, is_hopper(client)),
            fragments: restriction.fragments(|| fragments(client)),
            disabled_engines: restriction.disabled_engines(),
            not_built: Engine::WITH_KERNELS
                .iter()
                .filter_map(|engine| Some((*engine, engine.missing_build_feature()?)))
                .collect(),
        }
    }
}

/// The profiles of the devices that this process has queried.
#[cfg(feature = "cube")]
static PROFILES: LazyLock<Mutex<HashMap<CubeDevice, Arc<DeviceProfile>>>> =
    LazyLock::new(Mutex::default);

/// Returns CubeCL's handle of a device, or `None` if the device has no CubeCL runtime.
#[cfg(feature = "cube")]
pub(crate) fn cube_device(device: &Device) -> Option<CubeDevice> {
    let device = device.clone().without_autodiff();
    match device.as_dispatch() {
        burn::backend::DispatchDevice::Cube(device) => Some(device.clone()),
        #[allow(
            unreachable_patterns,
            reason = "with no other backend compiled in, the arm above covers all devices"
        )]
        _ => None,
    }
}

/// Returns the features in `properties`, plus wgmma if `has_wgmma`. The type of `properties` has no entry for wgmma.
#[cfg(feature = "cube")]
fn features(properties: &DeviceProperties, has_wgmma: bool) -> Vec<Feature> {
    let features = &properties.features;
    let of_dtype = |dtype| {
        let element = dtype_to_storage_type(dtype);
        let product = MmaConfig {
            a_type: element,
            b_type: element,
            cd_type: FloatKind::F32.into(),
            m: 16,
            n: 8,
            k: 16,
        };
        [
            (Feature::Mma(dtype), features.matmul.mma.contains(&product)),
            (
                Feature::LoadMatrix(dtype),
                features.matmul.ldmatrix.contains(&element),
            ),
        ]
    };
    [DType::F16, DType::BF16]
        .into_iter()
        .flat_map(of_dtype)
        .chain([
            (Feature::CopyAsync, features.copy_async),
            (Feature::Tma, features.tma.contains(Tma::Base)),
            (Feature::Wgmma, has_wgmma),
        ])
        .filter(|(_, is_there)| *is_there)
        .map(|(feature, _)| feature)
        .collect()
}

/// Reads the supported matrix multiplications on fragments (cmma) from the properties of a client.
#[cfg(feature = "cube")]
fn fragments(client: &Client) -> FragmentSupport {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    let of_dtype = |config: &MmaConfig| {
        let is_left = |dtype: &DType| config.a_type == dtype_to_storage_type(*dtype);
        let dtype = dtypes.into_iter().find(is_left)?;
        let sums = config.cd_type == FloatKind::F32.into();
        (sums && config.b_type == config.a_type).then_some(Fragments {
            m: config.m as usize,
            n: config.n as usize,
            k: config.k as usize,
            dtype,
            emulation: None,
        })
    };
    let physical = properties.identity.physical.as_ref();
    let is_intel = physical.and_then(|card| card.vendor) == Some(PciVendor::Intel);
    FragmentSupport {
        kinds: properties.features.matmul.cmma.iter().filter_map(of_dtype).collect(),
        plane_sizes: (hardware.plane_size_min as usize, hardware.plane_size_max as usize),
        // Mark the cmma of all Intel devices as faulty. Only some generations are faulty
        // (<https://github.com/tracel-ai/cubecl/issues/1444>), but the runtime does not report the GPU's generation.
        fault: is_intel.then_some(
            "Intel's Vulkan driver loads the first tile of shared memory instead of the requested one on some of its cards",
        ),
        verdicts: None,
    }
}

/// Returns the number of hardware threads of the CPU.
#[cfg(feature = "cube")]
fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| available_parallelism().map_or(1, NonZero::get))
}
