//! Writes CUDA C++ source of NVIDIA kernels.
//!
//! NVRTC and ptxas, which also exist as Python packages, compile the written files on a machine without a GPU. The
//! output of the two compilers shows registers, spills and SASS. If ptxas prints the warning C7513, the kernel waits
//! for each wgmma separately.
//!
//! ptxas 13.0 serializes the wgmma instructions of some kernels that ptxas 12.9 compiles without serialization.

use crate::auxiliary::mask_bits::kernel::MaskOffsetsCompilationArg;
use crate::engine::tensor_core::common::FragmentKind;
use crate::engine::tensor_core::common::bias::BiasReads;
use crate::engine::tensor_core::common::scoring::{
    GradientGridCompilationArg, MaskingCompilationArg, ScoringCompilationArg,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::common::tile_scheduler::TileSchedulerCompilationArg;
use crate::math::schedule::ScheduleCompilationArg;
use crate::math::side::Side;
use crate::source::{ARGUMENTS, GRID, SEQ_LENS, Wanted, optional};
use cube_kit::nvidia::Half;
use cubecl::{ir::*, prelude::*, profile::TimingMethod};
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures};
use std::{fs, path::Path, sync::Arc};

pub(crate) const ELEMENT: ElemType = ElemType::Float(FloatKind::BF16);

impl Wanted {
    pub fn kind(&self, side: Side) -> TileKind {
        TileKind {
            fragment: FragmentKind {
                side,
                structure: self.structure,
                score: self.score,
                raw: !self.score.has_slope() && !self.score.bias,
                has_slope: self.score.has_slope(),
                bias_reads: match (self.bias_of_head, self.score.bias, side) {
                    (true, _, _) => BiasReads::OnceAHead,
                    (false, true, Side::Queries) => BiasReads::Ahead(Half::Bf16),
                    (false, _, _) => BiasReads::There,
                },
            },
            heads: 1,
            split: false,
            page_len: self.page_len,
        }
    }
}

const SCHEDULE: ScheduleCompilationArg = ScheduleCompilationArg {
    items: (),
    launched: (),
    paired: (),
};

const MASK_OFFSETS: MaskOffsetsCompilationArg = MaskOffsetsCompilationArg {
    batch: (),
    head: (),
    row: (),
    blocks: (),
    block_batch: (),
    block_head: (),
    block_tile: (),
};

/// Builds an argument of a tensor-core kernel: the inputs that hide keys and turn `q·k` into scores. An optional input
/// is present only if `wanted` asks for it.
pub(crate) fn scoring<F: Float, NB: Size>(wanted: &Wanted) -> ScoringCompilationArg<F, NB> {
    ScoringCompilationArg {
        masking: MaskingCompilationArg {
            seq_lens: SEQ_LENS,
            lengths_and_ids: optional!(wanted.has_lengths_or_ids()),
            mask: optional!(wanted.structure.mask),
            mask_offsets: MASK_OFFSETS,
        },
        bias: optional!(wanted.score.bias),
        arguments: ARGUMENTS,
        dropout: wanted.dropout(),
        tables: wanted.tables(),
    }
}

pub(crate) const SCHEDULER: TileSchedulerCompilationArg = TileSchedulerCompilationArg {
    grid: GRID,
    schedule: SCHEDULE,
    group: (),
};

pub(crate) const GRADIENT_GRID: GradientGridCompilationArg = GradientGridCompilationArg {
    grid: GRID,
    group: (),
};

/// Returns the device properties of an H200.
pub(crate) fn properties() -> Arc<DeviceProperties> {
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

/// Writes a kernel's source to a file. The first line of the file gives the kernel's shared memory per cube in bytes.
pub(crate) fn save(folder: &Path, name: &str, shared_memory: usize, definition: KernelDefinition) {
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
    let source = format!(
        "// {shared_memory} bytes of shared memory\n{}",
        compiled.source
    );
    fs::write(&path, source).expect("the folder is writable");
    println!("{}", path.display());
}
