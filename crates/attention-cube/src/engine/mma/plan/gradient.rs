//! The tiles of the `mma` engine's backward: which gradient each of its kernels sums, and where things are in a cube's shared
//! memory.
//!
//! Every kernel holds a tile of one side, queries or keys, and passes over the blocks of the other. *Dots* are the operands whose
//! products are the scores, queries and keys; *values* those whose products are the gradients of P, the output's gradients and the
//! values.

mod split_d;
mod split_m;
mod table;

pub use self::split_d::{GradientSplitDTiles, Held};
pub use self::split_m::GradientSplitMTiles;
pub(crate) use self::table::gradient_tiles;
use super::check;
use crate::AttentionProblem;
use crate::device::DeviceProfile;
use crate::division::{self, HeldTiles};
use crate::math::side::{Side, Sums};
use crate::passes::delta::form::LogsumexpForm;
use crate::select::{Layouts, Refusal};

/// The kernels of the backward.
pub type BackwardPlan = division::BackwardPlan<GradientTiles>;

/// How the warps of a cube divide a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradientTiles {
    /// Split-M: each warp has rows, and all columns of their gradients.
    SplitM(GradientSplitMTiles),
    /// Split-D: each warp has columns of the gradient.
    SplitD(GradientSplitDTiles),
}

impl HeldTiles for GradientTiles {
    fn side(&self) -> Side {
        match self {
            Self::SplitM(tiles) => tiles.side,
            Self::SplitD(tiles) => tiles.side,
        }
    }

    fn rows(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.rows(),
            Self::SplitD(tiles) => tiles.rows,
        }
    }

    fn columns(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.columns,
            Self::SplitD(tiles) => tiles.columns,
        }
    }
}

impl GradientTiles {
    /// What is summed.
    pub const fn sums(&self) -> Sums {
        match self {
            Self::SplitM(tiles) => tiles.sums,
            Self::SplitD(tiles) => tiles.sums,
        }
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.units(),
            Self::SplitD(tiles) => tiles.units(),
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.shared_memory(),
            Self::SplitD(tiles) => tiles.shared_memory(),
        }
    }
}

/// The kernels of the backward of `problem`, or why there are none.
pub(crate) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<BackwardPlan, Refusal> {
    let half = check(problem, device)?;
    let kernels = gradient_tiles(
        problem.head_dim,
        problem.value_dim,
        half,
        LogsumexpForm::of_problem(problem) == LogsumexpForm::Apart,
        device,
    )?;
    BackwardPlan::new(problem, device, layouts, kernels)
}
