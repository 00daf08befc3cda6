//! The profile of a device: its limits and the features that engines require.

use super::engine::Engine;
use super::fragment_verdict::FragmentVerdicts;
use super::refusal::{Feature, Refusal};
use burn::tensor::DType;

/// The number of multiprocessors that plans assume if the runtime does not report their number.
pub(crate) const ASSUMED_MULTIPROCESSORS: usize = 16;

/// The largest number of loop iterations that a kernel's unit may run in total on a software driver. Mesa's llvmpipe
/// counts the iterations of all loops together. After 65,535 iterations, llvmpipe silently ends the loops
/// (`LP_MAX_TGSI_LOOP_ITERATIONS`).
pub(crate) const SOFTWARE_ITERATIONS: usize = 60_000;

/// The properties of a device that determine which kernels selection chooses.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProfile {
    /// The runtime's name, such as `cuda` or `wgpu<wgsl>`.
    pub name: String,
    /// The float dtypes that kernels can read and write.
    pub dtypes: Vec<DType>,
    /// The shared memory that a cube may allocate, in bytes.
    pub shared_memory: usize,
    /// The largest number of units (threads) per cube (thread block).
    pub units_per_cube: usize,
    /// The largest number of buffers that a kernel may bind.
    pub bindings: usize,
    /// The size of the largest buffer in bytes.
    pub largest_buffer: usize,
    /// The largest number of cubes along one dimension of a launch.
    pub cube_count: u32,
    /// The number of the CPU's hardware threads, if the driver emulates a GPU on the CPU. `None` for a GPU.
    pub processors: Option<usize>,
    /// The number of streaming multiprocessors, or `None` if the runtime does not report this number.
    pub multiprocessors: Option<usize>,
    /// The features of the device, in no particular order.
    pub features: Vec<Feature>,
    /// The matrix multiplications by planes (cmma) that the device supports.
    pub fragments: FragmentSupport,
    /// The engines that selection skips. Tests disable engines to reach the remaining engines.
    pub disabled_engines: Vec<Engine>,
    /// The engines without kernels in this build, each with the Cargo feature that builds the kernels.
    pub not_built: Vec<(Engine, &'static str)>,
}

/// The matrix multiplications on fragments that the device supports (`cubecl::cmma`). Only the device knows the
/// register layout of a fragment. The products are accumulated in f32.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FragmentSupport {
    /// The supported shapes and dtypes, in no particular order.
    pub kinds: Vec<Fragments>,
    /// The smallest and the largest number of units per plane.
    pub plane_sizes: (usize, usize),
    /// The reason why engines must not use the device's matrix multiplications, or `None` if engines may use them. One
    /// reason is a driver that is known to compute wrong products. Another is an override that disables the products.
    pub fault: Option<&'static str>,
    /// The verdicts of the self-check, which each tile must pass before its first use. `None` if engines may use the
    /// device's matrix multiplications without a check.
    pub verdicts: Option<FragmentVerdicts>,
}

/// The size and dtype of one matrix multiplication that a plane computes on fragments. An `m × k` matrix is multiplied
/// by a `k × n` matrix, and the product is accumulated in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragments {
    /// The number of rows of the accumulator.
    pub m: usize,
    /// The number of columns of the accumulator.
    pub n: usize,
    /// The number of columns of the left operand (the depth of the multiplication).
    pub k: usize,
    /// The dtype of both operands.
    pub dtype: DType,
    /// The emulation of the fragments with shared memory and loops, for tests. `None` for the device's own fragments.
    pub emulation: Option<Emulation>,
}

/// The results of emulated fragments. Tests of the self-check emulate drivers that compute wrong products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Emulation {
    /// The products are right.
    Exact,
    /// Stores of an accumulator exchange the first two elements of every vector of four elements.
    Swapped,
    /// Products leave out the last four columns of the left operand.
    Short,
    /// Loads of a right operand read the first tile of shared memory, as some of Intel's drivers do.
    FirstTile,
    /// Stores of an accumulator give zeros in the lower half of its rows.
    UpperRows,
}

impl Fragments {
    /// True if the fragments are emulated with shared memory and loops.
    pub const fn is_emulated(&self) -> bool {
        self.emulation.is_some()
    }
}

impl FragmentSupport {
    /// Returns the lines of [`FragmentVerdicts::lines`]. A device without matrix multiplications on fragments, or whose
    /// matrix multiplications need no check, has no lines.
    pub fn verdict_lines(&self) -> Vec<String> {
        match &self.verdicts {
            Some(verdicts) if !self.kinds.is_empty() => verdicts.lines(),
            _ => Vec::new(),
        }
    }
}

impl DeviceProfile {
    /// Returns [`Refusal::MissingFeature`] if the device lacks the feature.
    pub(crate) fn require(&self, feature: Feature) -> Result<(), Refusal> {
        match self.features.contains(&feature) {
            true => Ok(()),
            false => Err(Refusal::MissingFeature(feature)),
        }
    }
}
