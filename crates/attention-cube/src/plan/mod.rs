//! Selection: a problem and a device → a kernel with its tiles, or the reasons why each faster one refused.
//!
//! Engines are asked in order, the fastest first; each answers with a plan or a typed [`Refusal`]. The
//! [`reference`](crate::reference) comes last and serves everything. A new engine is a variant of
//! [`Engine`] and of [`Kernel`], and a row in [`select`].

pub mod unit;

use crate::AttentionProblem;
use burn::tensor::DType;
use unit::UnitPlan;

/// The ways there are to compute attention, the fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// CubeCL kernels that need no plane operations, no matrix units, and little shared memory.
    Unit,
    /// Burn's own tensor operations, with all scores in memory.
    Reference,
}

/// Which of the two passes is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Output and logsumexp.
    Forward,
    /// The gradients.
    Backward,
}

/// The kernel that serves a pass.
#[derive(Clone, Debug, PartialEq)]
pub enum Kernel {
    /// See [`Engine::Unit`].
    Unit(UnitPlan),
    /// See [`Engine::Reference`].
    Reference,
}

impl Kernel {
    /// The engine it belongs to.
    pub fn engine(&self) -> Engine {
        match self {
            Self::Unit(_) => Engine::Unit,
            Self::Reference => Engine::Reference,
        }
    }

    /// Parts that the keys are split into, side by side, whose results are merged: 1 where they are not.
    pub fn splits(&self) -> usize {
        match self {
            Self::Unit(UnitPlan::Forward(plan)) => plan.splits,
            Self::Unit(UnitPlan::Backward(_)) | Self::Reference => 1,
        }
    }
}

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
    /// Cubes along one dimension of a launch.
    pub cube_count: u32,
    /// Streaming multiprocessors, where the runtime says.
    pub multiprocessors: Option<usize>,
}

/// Why an engine does not serve a problem on a device.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The device runs no CubeCL kernels.
    #[error("the device does not run CubeCL kernels")]
    NoCubeCL,
    /// The dtype cannot be read or written by kernels there.
    #[error("kernels on this device have no {0:?}")]
    Dtype(DType),
    /// No row of the tile table fits.
    #[error(
        "no tile for {width} columns fits {shared_memory} bytes of shared memory and {units} units a cube"
    )]
    Tiles {
        /// Columns that the output needs.
        width: usize,
        /// The device's limit.
        shared_memory: usize,
        /// The device's limit.
        units: usize,
    },
    /// Too many tensors at once.
    #[error(
        "these options need {needed} buffers, and a kernel on this device may bind {available}"
    )]
    Bindings {
        /// Buffers of the kernel with the most.
        needed: usize,
        /// The device's limit.
        available: usize,
    },
    /// Positions would not fit.
    #[error("sequences of {length} are longer than {limit}")]
    Length {
        /// The longer of the two lengths.
        length: usize,
        /// The engine's limit.
        limit: usize,
    },
}

/// The choice for one pass, and what was not chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// The kernel chosen.
    pub kernel: Kernel,
    /// The engines asked before it, and their reasons.
    pub refusals: Vec<(Engine, Refusal)>,
}

/// Chooses the kernel for `pass`. `device` is `None` where no CubeCL kernels run; `vectorized` says
/// whether every row can be read in vectors of four.
pub fn select(
    problem: &AttentionProblem,
    device: Option<&DeviceProfile>,
    vectorized: bool,
    pass: Pass,
) -> Selection {
    let unit = device
        .ok_or(Refusal::NoCubeCL)
        .and_then(|device| unit::plan(problem, device, vectorized, pass));
    match unit {
        Ok(plan) => Selection {
            kernel: Kernel::Unit(plan),
            refusals: Vec::new(),
        },
        Err(refusal) => Selection {
            kernel: Kernel::Reference,
            refusals: vec![(Engine::Unit, refusal)],
        },
    }
}
