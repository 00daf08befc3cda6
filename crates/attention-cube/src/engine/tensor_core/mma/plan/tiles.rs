//! The tiles of the mma engine's forward.

use super::occupancy::cubes_per_multiprocessor;
use super::split_d::MmaSplitDTiles;
use super::split_m::MmaSplitMTiles;
use super::split_n::MmaSplitNTiles;

/// The tiles of a forward kernel. The three variants are three ways to divide a tile among warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MmaForwardTiles {
    /// Split-M: each warp has some rows of the tile, and computes all columns of the output of these rows.
    SplitM(MmaSplitMTiles),
    /// Split-N, for tiles with few rows: each warp processes all rows of the tile, but only some of the keys.
    SplitN(MmaSplitNTiles),
    /// Split-D: each warp computes some columns of the output for some rows of the tile.
    SplitD(MmaSplitDTiles),
}

impl MmaForwardTiles {
    /// The number of queries per tile.
    pub const fn rows(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.rows(),
            Self::SplitN(tiles) => tiles.rows(),
            Self::SplitD(tiles) => tiles.rows,
        }
    }

    /// The number of keys per block.
    pub const fn keys(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.keys,
            Self::SplitN(tiles) => tiles.keys,
            Self::SplitD(tiles) => tiles.keys,
        }
    }

    /// The number of threads per CTA.
    pub const fn units(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.units(),
            Self::SplitN(tiles) => tiles.units(),
            Self::SplitD(tiles) => tiles.units(),
        }
    }

    /// The bytes of shared memory per CTA.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.shared_memory(),
            Self::SplitN(tiles) => tiles.shared_memory(),
            Self::SplitD(tiles) => tiles.shared_memory(),
        }
    }

    /// True if the kernel can read K and V from pages of `page_len` keys without a copy. For this, each block must lie
    /// in one page.
    pub(crate) const fn reads_pages(&self, page_len: usize) -> bool {
        match self {
            Self::SplitN(tiles) => page_len.is_multiple_of(tiles.keys),
            Self::SplitM(_) | Self::SplitD(_) => false,
        }
    }

    /// The number of keys that a CTA multiplies at the same time, over all warps.
    pub(super) const fn keys_at_once(&self) -> usize {
        match self {
            Self::SplitN(tiles) => tiles.keys * tiles.key_groups,
            Self::SplitM(_) | Self::SplitD(_) => self.keys(),
        }
    }

    /// The number of CTAs that run at once on a multiprocessor, if one CTA may take at most `shared_memory` bytes.
    pub(super) fn cubes_per_multiprocessor(&self, shared_memory: usize) -> usize {
        cubes_per_multiprocessor(self.units(), self.shared_memory(), shared_memory)
    }
}
