//! The tiles of a backward kernel.

use super::split_d::MmaGradientSplitDTiles;
use super::split_m::MmaGradientSplitMTiles;
use crate::engine::tensor_core::mma::plan::occupancy::cubes_per_multiprocessor;
use crate::engine::tiling::BackwardTiles;
use crate::math::side::{Side, Sums};

/// The tiles of a backward kernel. The two variants are two ways to divide a tile among warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MmaGradientTiles {
    /// Split-M: each warp has some rows of the tile, and computes all columns of the gradients of these rows.
    SplitM(MmaGradientSplitMTiles),
    /// Split-D: each warp computes some rows and some columns of a gradient.
    SplitD(MmaGradientSplitDTiles),
}

impl BackwardTiles for MmaGradientTiles {
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

    fn sums(&self) -> Sums {
        self.sums()
    }

    fn cubes_per_multiprocessor(&self, shared_memory: usize) -> usize {
        cubes_per_multiprocessor(self.units(), self.shared_memory(), shared_memory)
    }
}

impl MmaGradientTiles {
    /// The gradients that the kernel computes.
    pub const fn sums(&self) -> Sums {
        match self {
            Self::SplitM(tiles) => tiles.sums,
            Self::SplitD(tiles) => tiles.sums,
        }
    }

    /// The number of threads per CTA.
    pub const fn units(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.units(),
            Self::SplitD(tiles) => tiles.units(),
        }
    }

    /// The bytes of shared memory per CTA.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.shared_memory(),
            Self::SplitD(tiles) => tiles.shared_memory(),
        }
    }
}
