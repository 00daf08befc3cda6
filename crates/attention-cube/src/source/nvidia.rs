//! The CUDA C++ of NVIDIA's kernels.
//!
//! NVRTC and ptxas, which come as Python packages, too, make of the files what they would on a card: registers, spills, products that
//! are waited for one by one (C7513), SASS. A card's kernels are compiled by the ptxas of its toolkit, and versions differ: 13.0 finds
//! reasons to wait where 12.9 finds none.

use super::Wanted;
use crate::fragment::FragmentKind;
use crate::fragment::bias::BiasReads;
use crate::fragment::work_tile::TileKind;
use crate::math::schedule::ScheduleCompilationArg;
use crate::math::side::Side;
use crate::passes::mask_bits::kernel::MaskPlacesCompilationArg;
use cube_kit::hopper::Half;
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
                raw: !self.score.softcap && !self.score.bias,
                has_slope: self.score.softcap,
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
}

pub(crate) const SCHEDULE: ScheduleCompilationArg = ScheduleCompilationArg {
    items: (),
    launched: (),
    paired: (),
};

pub(crate) const MASK_PLACES: MaskPlacesCompilationArg = MaskPlacesCompilationArg {
    batch: (),
    head: (),
    row: (),
    blocks: (),
    block_batch: (),
    block_head: (),
    block_tile: (),
};

/// An H200.
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

/// Writes a kernel's source, whose first line says how much shared memory a cube of it takes.
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
    fs::write(&path, source).expect("a file");
    println!("{}", path.display());
}
