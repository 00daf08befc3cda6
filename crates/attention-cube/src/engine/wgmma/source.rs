//! The CUDA C++ of the Hopper kernels, written on a machine that needs no GPU:
//!
//! ```sh
//! KERNELS="forward-128-128-mask backward-64-64" cargo test --features cuda --lib wgmma::source -- --ignored --nocapture
//! ```
//!
//! A name is a pass, head_dim, value_dim, and options of [`Wanted`]. NVRTC and ptxas, which come as Python packages, too, make of
//! the files what they would on a card: registers, spills, products that are waited for one by one (C7513), SASS. A card's
//! kernels are compiled by the ptxas of its toolkit, and versions differ: 13.0 finds reasons to wait where 12.9 finds none.

use super::backward::split_d::backward_split_d::BackwardSplitD;
use super::backward::split_m::backward_split_m::BackwardSplitM;
use super::forward::split_d::forward_split_d::ForwardSplitD;
use super::forward::split_m::forward_split_m::ForwardSplitM;
use crate::engine::wgmma::backward::copies::GradientStepsCompilationArg;
use crate::engine::wgmma::forward::copies::StepsCompilationArg;
use crate::engine::wgmma::plan::{ForwardTiles, GradientTiles, forward_tiles, gradient_tiles};
use crate::fragment::FragmentKind;
use crate::fragment::bias::BiasReads;
use crate::fragment::work_tile::TileKind;
use crate::math::schedule::{GridCompilationArg, ScheduleCompilationArg};
use crate::math::score::{ScoreArgumentsCompilationArg, ScoreKind};
use crate::math::side::Side;
use crate::math::visibility::{ExtentCompilationArg, Structure};
use crate::passes::mask_bits::kernel::MaskPlacesCompilationArg;
use cube_kit::hopper::Half;
use cubecl::{
    CubeKernel,
    ir::{settings::*, *},
    prelude::*,
    profile::TimingMethod,
};
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use std::{env, fs, path::Path, sync::Arc};

const ELEMENT: ElemType = ElemType::Float(FloatKind::BF16);

/// A tensor that is there or not, as kernels are compiled for it.
macro_rules! optional {
    ($present:expr) => {
        match $present {
            true => ComptimeOptionCompilationArg::Some(tensor()),
            false => ComptimeOptionCompilationArg::None,
        }
    };
}

/// Writes the kernels that `KERNELS` names into `kernels` in the folder for temporary files.
#[test]
#[ignore = "writes files for whoever reads them"]
fn write() {
    let names = env::var("KERNELS").unwrap_or_else(|_| "forward-128-128 backward-128-128".into());
    let folder = env::temp_dir().join("kernels");
    fs::create_dir_all(&folder).expect("a folder");
    for name in names.split_whitespace() {
        let wanted = Wanted::of(name);
        match name.split('-').next() {
            Some("forward") => wanted.forward(&folder, name),
            Some("backward") => wanted.backward(&folder, name),
            _ => panic!("{name} begins with neither forward nor backward"),
        }
    }
}

/// What kernels are compiled for.
struct Wanted {
    head_dim: usize,
    value_dim: usize,
    causal: bool,
    structure: Structure,
    score: ScoreKind,
    bias_of_head: bool,
    sinks: bool,
}

impl Wanted {
    fn of(name: &str) -> Self {
        let parts: Vec<&str> = name.split('-').collect();
        let width = |index: usize| -> usize {
            let part = parts.get(index).and_then(|part| part.parse().ok());
            part.unwrap_or_else(|| panic!("{name} is not PASS-HEAD_DIM-VALUE_DIM…"))
        };
        let known = [
            "causal", "softcap", "wide", "bias", "headbias", "mask", "lengths", "segments", "sinks",
        ];
        for option in parts.iter().skip(3) {
            assert!(known.contains(option), "{option} is none of {known:?}");
        }
        let has = |option: &str| parts[3..].contains(&option);
        Self {
            head_dim: width(1),
            value_dim: width(2),
            causal: has("causal"),
            structure: Structure {
                lengths: has("lengths"),
                segments: has("segments"),
                mask: has("mask"),
            },
            score: ScoreKind {
                softcap: has("softcap") || has("wide"),
                wide_softcap: has("wide"),
                bias: has("bias") || has("headbias"),
            },
            bias_of_head: has("headbias"),
            sinks: has("sinks"),
        }
    }

    fn kind(&self, side: Side) -> TileKind {
        TileKind {
            fragment: FragmentKind {
                side,
                structure: self.structure,
                score: self.score,
                raw: !self.score.softcap && !self.score.bias,
                bias_reads: match (self.bias_of_head, self.score.bias, side) {
                    (true, _, _) => BiasReads::OnceAHead,
                    (false, true, Side::Queries) => BiasReads::Ahead(Half::Bf16),
                    (false, _, _) => BiasReads::There,
                },
            },
            heads: 1,
            split: false,
        }
    }

    fn forward(&self, folder: &Path, name: &str) {
        let masked = self.structure.mask || self.score.bias;
        let tiles = forward_tiles(
            self.head_dim,
            self.value_dim,
            Half::Bf16,
            self.causal,
            masked,
            self.score.bias && !self.bias_of_head,
        );
        let tiles = tiles.unwrap_or_else(|| panic!("no tiles for {name}"));
        let kind = self.kind(Side::Queries);
        let settings = settings(tiles.units());
        macro_rules! definition {
            ($kernel:ident, $tiles:expr, [$($read:expr),*]) => {
                $kernel::new(
                    settings,
                    properties(),
                    Arc::default(),
                    $($read,)*
                    optional!(self.structure.mask),
                    optional!(self.score.bias),
                    optional!(self.structure.segments || self.structure.lengths),
                    optional!(self.sinks),
                    (),
                    tensor(),
                    tensor(),
                    GRID,
                    SCHEDULE,
                    EXTENT,
                    ARGUMENTS,
                    STEPS,
                    MASK_PLACES,
                    (),
                    (),
                    $tiles,
                    kind,
                    tiles.stores_output_by_tma(),
                    ELEMENT,
                    ELEMENT,
                    ELEMENT,
                    ELEMENT,
                    2,
                    2,
                    $tiles.fragments(),
                )
                .define()
            };
        }
        let definition = match tiles {
            ForwardTiles::SplitM(tiles) => definition!(ForwardSplitM, tiles, [(), (), (), ()]),
            ForwardTiles::SplitD(tiles) => definition!(ForwardSplitD, tiles, [(), (), ()]),
        };
        save(folder, name, definition);
    }

    fn backward(&self, folder: &Path, name: &str) {
        let kernels = gradient_tiles(self.head_dim, self.value_dim, Half::Bf16, self.score.bias);
        for (tiles, sums) in kernels.into_iter().zip(["query", "key", "value"]) {
            let Some(tiles) = tiles else { continue };
            let kind = self.kind(tiles.side());
            let settings = settings(tiles.units());
            let has_lengths_or_ids = self.structure.segments || self.structure.lengths;
            // By the tensors that differ: what the copy engine reads, and what is summed.
            macro_rules! definition {
                ($kernel:ident, $tiles:expr, [$($read:expr),*], [$($summed:expr),*]) => {
                    $kernel::new(
                        settings,
                        properties(),
                        Arc::default(),
                        $($read,)*
                        tensor(),
                        optional!(self.structure.mask),
                        optional!(self.score.bias),
                        optional!(has_lengths_or_ids),
                        $($summed,)*
                        GRID,
                        EXTENT,
                        ARGUMENTS,
                        GRADIENT_STEPS,
                        MASK_PLACES,
                        (),
                        $tiles,
                        kind,
                        ELEMENT,
                        ELEMENT,
                        2,
                        2,
                        $tiles.fragments(),
                    )
                    .define()
                };
            }
            let definition = match tiles {
                GradientTiles::SplitM(tiles) => definition!(
                    BackwardSplitM,
                    tiles,
                    [(), (), (), (), ()],
                    [(), tensor(), (), tensor()]
                ),
                GradientTiles::SplitD(tiles) => definition!(
                    BackwardSplitD,
                    tiles,
                    [(), (), (), (), (), ()],
                    [(), tensor()]
                ),
            };
            save(folder, &format!("{name}-{sums}"), definition);
        }
    }
}

fn tensor() -> TensorCompilationArg {
    TensorCompilationArg {
        meta: TensorMetaCompilationArg { len: (), rank: () },
        buffer: BufferCompilationArg { inplace: None },
    }
}

const GRID: GridCompilationArg = GridCompilationArg {
    tiles: (),
    splits: (),
    heads: (),
    planes: (),
    together: (),
    cubes: (),
};

const SCHEDULE: ScheduleCompilationArg = ScheduleCompilationArg {
    items: (),
    launched: (),
    paired: (),
};

const EXTENT: ExtentCompilationArg = ExtentCompilationArg {
    q_len: (),
    kv_len: (),
    left: (),
    right: (),
    bottom_right: (),
    query_ids: (),
    key_ids: (),
    query_bounds: (),
    key_bounds: (),
    query_blocks: (),
    key_blocks: (),
};

const ARGUMENTS: ScoreArgumentsCompilationArg = ScoreArgumentsCompilationArg {
    scale: (),
    softcap: (),
    negative_infinity: (),
};

const STEPS: StepsCompilationArg = StepsCompilationArg {
    query_batch: (),
    key_batch: (),
    key_head: (),
    value_batch: (),
    value_head: (),
    bias_batch: (),
    bias_head: (),
};

const GRADIENT_STEPS: GradientStepsCompilationArg = GradientStepsCompilationArg {
    stationary_dot_batch: (),
    stationary_dot_head: (),
    stationary_value_batch: (),
    stationary_value_head: (),
    dot_batch: (),
    dot_head: (),
    value_batch: (),
    value_head: (),
};

const MASK_PLACES: MaskPlacesCompilationArg = MaskPlacesCompilationArg {
    batch: (),
    head: (),
    row: (),
    blocks: (),
    block_batch: (),
    block_head: (),
    block_tile: (),
};

fn settings(units: usize) -> KernelSettings {
    let units = CubeDim::new_1d(units as u32);
    KernelSettings::new(units.into(), ExecutionMode::Unchecked, AddressType::U32)
}

/// An H200.
fn properties() -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 232_448,
        max_cube_count: (u32::MAX >> 1, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: "NVIDIA H200".into(),
        fingerprint: "ptx_sm90".into(),
        physical: None,
    };
    Arc::new(DeviceProperties::new(
        Default::default(),
        MemoryDeviceProperties::new(1 << 36, 512),
        hardware,
        TimingMethod::Device,
        identity,
    ))
}

fn save(folder: &Path, name: &str, definition: KernelDefinition) {
    let options = CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            clusters: true,
            fast_math: true,
            fast_tanh: true,
            elect_sync: true,
            dp4a: true,
        },
        amd_wmma: None,
    };
    let mut compiler = CppCompiler::<cubecl_cpp::target::Cuda>::default();
    let compiled = cubecl::Compiler::compile(&mut compiler, definition, &options)
        .unwrap_or_else(|error| panic!("{name}: {error:?}"));
    let path = folder.join(format!("{name}.cu"));
    fs::write(&path, compiled.source).expect("a file");
    println!("{}", path.display());
}
