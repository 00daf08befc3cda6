//! The engines, each a folder with its plan, its tiles, its kernels and their launch.

pub mod unit;
pub mod wgmma;

use unit::plan::UnitPlan;
use wgmma::plan::WgmmaPlan;

/// The ways there are to compute attention, the fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// CubeCL kernels for NVIDIA's Hopper: TMA, mbarriers and warpgroup matrix products.
    Wgmma,
    /// CubeCL kernels that need no plane operations, no matrix units, and little shared memory.
    Unit,
    /// Burn's own tensor operations, with all scores in memory.
    Reference,
}

/// The kernel that serves a pass.
#[derive(Clone, Debug, PartialEq)]
pub enum Kernel {
    /// See [`Engine::Wgmma`].
    Wgmma(WgmmaPlan),
    /// See [`Engine::Unit`].
    Unit(UnitPlan),
    /// See [`Engine::Reference`].
    Reference,
}

impl Kernel {
    /// The engine it belongs to.
    pub fn engine(&self) -> Engine {
        match self {
            Self::Wgmma(_) => Engine::Wgmma,
            Self::Unit(_) => Engine::Unit,
            Self::Reference => Engine::Reference,
        }
    }

    /// Parts that the keys are split into, side by side, whose results are merged: 1 where they are not.
    pub fn splits(&self) -> usize {
        match self {
            Self::Wgmma(WgmmaPlan::Forward(plan)) => plan.splits,
            Self::Unit(UnitPlan::Forward(plan)) => plan.splits,
            Self::Wgmma(WgmmaPlan::Backward(_))
            | Self::Unit(UnitPlan::Backward(_))
            | Self::Reference => 1,
        }
    }
}
