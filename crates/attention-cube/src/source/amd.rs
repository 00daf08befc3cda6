//! Writes machine code of AMD kernels, with the CubeCL compiler that Burn's feature `rocm` uses. ROCm need not be
//! installed.

use crate::testing;
use crate::types::device::{DeviceProfile, FragmentSupport, Fragments};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use cubecl::hip::compiler::{HipBackend, HipCompilationOptions, HipCompiler, HipRepresentation};
use cubecl::ir::{amd::GfxArch, features::MmaConfig, *};
use cubecl::{prelude::*, profile::TimingMethod};
use std::{fs, path::Path, sync::Arc};

/// The shared memory per cube in bytes, which is equal on all AMD GPUs in this module.
const SHARED_MEMORY: usize = 64 << 10;

/// An AMD GPU, identified by its architecture.
pub(crate) struct Card {
    architecture: GfxArch,
}

impl Card {
    pub fn of(name: &str) -> Self {
        let architecture = GfxArch::parse(name);
        assert!(
            architecture.plane_dim().is_some(),
            "CubeCL does not support the architecture {name}"
        );
        Self { architecture }
    }

    pub fn name(&self) -> &str {
        self.architecture.name()
    }

    /// Returns the number of units per plane.
    fn plane(&self) -> u32 {
        self.architecture
            .plane_dim()
            .expect("`of` has checked the architecture")
    }

    /// Returns the fragment multiplications, with shapes and dtypes, that CubeCL reports when it compiles through LLVM.
    /// CubeCL reports no fragment multiplication for AMD's CDNA GPUs.
    fn fragments(&self) -> Vec<Fragments> {
        let dtypes: &[DType] = match self.architecture.wmma() {
            Some(_) => &[DType::F16, DType::BF16],
            None => &[],
        };
        let of_dtype = |dtype: &DType| Fragments {
            m: 16,
            n: 16,
            k: 16,
            dtype: *dtype,
            emulation: None,
        };
        dtypes.iter().map(of_dtype).collect()
    }

    /// Returns the device profile that engines use for their plans.
    pub fn profile(&self) -> DeviceProfile {
        let plane = self.plane() as usize;
        DeviceProfile {
            dtypes: vec![DType::F32, DType::F16, DType::BF16],
            fragments: FragmentSupport {
                kinds: self.fragments(),
                plane_sizes: (plane, plane),
                fault: None,
                verdicts: None,
            },
            ..testing::card(SHARED_MEMORY)
        }
    }

    /// Returns the device properties that CubeCL uses to compile the kernels.
    pub fn properties(&self) -> Arc<DeviceProperties> {
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: self.plane(),
            plane_size_max: self.plane(),
            max_bindings: 1024,
            max_shared_memory_size: SHARED_MEMORY,
            max_cube_count: (u32::MAX >> 1, 65_535, 65_535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 1024),
            num_streaming_multiprocessors: None,
            num_tensor_cores: None,
            min_tensor_cores_dim: self.architecture.wmma().map(|_| 16),
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        };
        let name = self.architecture.name();
        let identity = DeviceIdentity {
            name: name.into(),
            fingerprint: format!("hip-kernel_{name}"),
            physical: None,
        };
        let mut properties = DeviceProperties::new(
            Default::default(),
            MemoryDeviceProperties::new(1 << 36, 512),
            hardware,
            TimingMethod::Device,
            identity,
        );
        let product = |fragments: Fragments| MmaConfig {
            a_type: dtype_to_storage_type(fragments.dtype),
            b_type: dtype_to_storage_type(fragments.dtype),
            cd_type: FloatKind::F32.into(),
            m: fragments.m as u32,
            n: fragments.n as u32,
            k: fragments.k as u32,
        };
        let products = self.fragments().into_iter().map(product);
        properties.features.matmul.cmma.extend(products);
        Arc::new(properties)
    }

    /// Writes a kernel's machine code to `path`, and returns the kernel's shared memory per cube in bytes.
    pub fn save(&self, path: &Path, definition: KernelDefinition) -> Result<usize, String> {
        let options = HipCompilationOptions {
            arch: Some(self.architecture.clone()),
            ..Default::default()
        };
        let mut compiler = HipCompiler::new(HipBackend::Llvm);
        let compiled = cubecl::Compiler::compile(&mut compiler, definition, &options)
            .map_err(|error| error.to_string())?;
        let HipRepresentation::Llvm(module) = compiled else {
            unreachable!("the compiler was created for LLVM")
        };
        fs::write(path, &*module.code_object).expect("the folder is writable");
        assert!(
            module.shared_memory_size <= SHARED_MEMORY,
            "{}",
            path.display()
        );
        Ok(module.shared_memory_size)
    }
}
