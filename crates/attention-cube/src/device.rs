//! What a device can: its limits, the features that engines ask for, and how CubeCL's answers become them.

use crate::engine::Engine;
#[cfg(feature = "cube")]
use crate::restriction::Restriction;
use crate::select::Refusal;
use crate::tile::fragment_tiles::Fragments;
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn::{backend::cubecl::dtype_to_storage_type, tensor::Device};
#[cfg(feature = "cube")]
use cube_kit::hopper::is_hopper;
#[cfg(feature = "cube")]
use cubecl::client::Client;
#[cfg(feature = "cube")]
use cubecl::ir::features::{MmaConfig, Tma, TypeUsage};
#[cfg(feature = "cube")]
use cubecl::ir::{DeviceProperties, FloatKind, PciVendor};
#[cfg(feature = "cube")]
use std::{num::NonZero, sync::OnceLock, thread::available_parallelism};

/// Multiprocessors assumed where the runtime does not say.
pub(crate) const ASSUMED_MULTIPROCESSORS: usize = 16;

/// Iterations of all loops of a unit that a software driver may be given: Mesa's llvmpipe ends them after 65535
/// (`LP_MAX_TGSI_LOOP_ITERATIONS`), and says nothing.
pub(crate) const SOFTWARE_ITERATIONS: usize = 60_000;

/// What of a device the choice depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProfile {
    /// The runtime's name, such as `cuda` or `wgpu<wgsl>`.
    pub name: String,
    /// Float dtypes that kernels can read and write.
    pub dtypes: Vec<DType>,
    /// Bytes of shared memory that a cube may take.
    pub shared_memory: usize,
    /// Units that a cube may have.
    pub units_per_cube: usize,
    /// Buffers that a kernel may bind.
    pub bindings: usize,
    /// Bytes that a buffer may have.
    pub largest_buffer: usize,
    /// Cubes along one dimension of a launch.
    pub cube_count: u32,
    /// The processor's threads, where it does the work, as with Mesa's llvmpipe; `None` on a card.
    pub processors: Option<usize>,
    /// Streaming multiprocessors, where the runtime says.
    pub multiprocessors: Option<usize>,
    /// What it has beyond these, in no order.
    pub features: Vec<Feature>,
    /// Matrices that its planes multiply in a layout of their own.
    pub fragments: FragmentSupport,
    /// Engines that are not asked: none, but in tests of the others.
    pub left_out: Vec<Engine>,
    /// Engines whose kernels this build lacks, each with the Cargo feature that builds them.
    pub not_built: Vec<(Engine, &'static str)>,
}

/// The matrices that a device's planes multiply in a layout of their own (`cubecl::cmma`), as far as sums are in f32.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FragmentSupport {
    /// What it multiplies, in no order.
    pub kinds: Vec<Fragments>,
    /// Units of a plane, at least and at most.
    pub plane_sizes: (usize, usize),
    /// Why its driver's products are not to be trusted, if they are not.
    pub fault: Option<&'static str>,
}

/// What an engine may need that not every device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Feature {
    /// Products of 16×16 by 16×8 of this dtype by a plane, summed in f32, in registers whose layout is known.
    #[error("matrix products of {0:?}, 16×8×16, by a plane (mma)")]
    Mma(DType),
    /// Matrices of this dtype from shared memory into the registers of these products.
    #[error("matrices of {0:?} loaded by a plane (ldmatrix)")]
    LoadMatrix(DType),
    /// Matrices of this dtype, or of f32 to which it is widened, that a plane multiplies in a layout of their own, summed in f32.
    #[error(
        "matrix products of {0:?} by a plane in fragments, 16×16×16, 16×8×16 or 8×8×8, summed in f32 (cmma)"
    )]
    Fragments(DType),
    /// Copies into shared memory that nobody waits for.
    #[error("copies that run beside a kernel's threads (copy_async)")]
    CopyAsync,
    /// Hopper's copy engine, which reads tiles of tensors.
    #[error("the tensor memory accelerator (TMA)")]
    Tma,
    /// Warpgroup products of half precision, and registers that warps hand each other (`setmaxnreg`). CubeCL asks no device for
    /// these: they are PTX of NVIDIA's sm_90a alone, which only its CUDA C++ compiler takes, so that the architecture is what tells.
    #[error(
        "warpgroup matrix products (wgmma) of a Hopper GPU (sm_90), through CubeCL's CUDA C++ compiler"
    )]
    Wgmma,
}

impl DeviceProfile {
    /// Refuses where a feature is missing.
    pub(crate) fn require(&self, feature: Feature) -> Result<(), Refusal> {
        match self.features.contains(&feature) {
            true => Ok(()),
            false => Err(Refusal::MissingFeature(feature)),
        }
    }
}

#[cfg(feature = "cube")]
impl DeviceProfile {
    /// Of a device, if it runs CubeCL kernels.
    pub(crate) fn of_device(device: &Device) -> Option<Self> {
        let device = device.clone().without_autodiff();
        match device.as_dispatch() {
            burn::backend::DispatchDevice::Cube(device) => Some(Self::of_client(&device.client())),
            #[allow(
                unreachable_patterns,
                reason = "without other backends it is the only device"
            )]
            _ => None,
        }
    }

    /// Of what CubeCL says of the device behind a client.
    pub(crate) fn of_client(client: &Client) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let restriction = Restriction::of_environment();
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
            // Of all that runtimes list, only a processor is no card.
            processors: properties.identity.physical.is_none().then(processors),
            multiprocessors: hardware
                .num_streaming_multiprocessors
                .map(|count| count as usize),
            features: features(properties, is_hopper(client)),
            fragments: restriction.fragments(|| fragments(client)),
            left_out: restriction.left_out(),
            not_built: Engine::WITH_KERNELS
                .iter()
                .filter_map(|engine| Some((*engine, engine.missing_build_feature()?)))
                .collect(),
        }
    }
}

/// The features among `properties`, and the warpgroup products, of which these know nothing.
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

/// What CubeCL says of the fragments of the device behind a client.
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
            emulated: false,
        })
    };
    let physical = properties.identity.physical.as_ref();
    let is_intel = physical.and_then(|card| card.vendor) == Some(PciVendor::Intel);
    FragmentSupport {
        kinds: properties.features.matmul.cmma.iter().filter_map(of_dtype).collect(),
        plane_sizes: (hardware.plane_size_min as usize, hardware.plane_size_max as usize),
        // <https://github.com/tracel-ai/cubecl/issues/1444>; nothing that the runtime says tells the generations apart.
        fault: is_intel.then_some(
            "Intel's Vulkan driver loads the first tile of shared memory, whichever is asked for, on some of its cards",
        ),
    }
}

/// Threads of this machine's processor.
#[cfg(feature = "cube")]
fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| available_parallelism().map_or(1, NonZero::get))
}
