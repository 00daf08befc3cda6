//! The tiles of the `wgmma` engine's forward, and the products that these are made of, the backward's among them.

mod split_d;
mod split_m;

pub use self::split_d::SplitDTiles;
pub use self::split_m::SplitMTiles;
use cube_kit::hopper::{Half, registers};

/// Bytes of shared memory that a cube may take on Hopper.
pub(super) const SHARED_MEMORY: usize = 232_448;

/// Bytes of it that suffice for barriers and the like.
const SMALL_BYTES: usize = 512;

/// A warpgroup's part of a tile's output, or of its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OutputShape {
    /// Columns that the warpgroup has.
    pub columns: usize,
    /// Columns that the tensor has.
    pub width: usize,
    /// TMA stores it, through shared memory; else threads store their rows.
    pub stored_by_tma: bool,
    /// From a subtile in shared memory to the next.
    pub subtile_bytes: usize,
    /// Nothing else is in its place there.
    pub own_place: bool,
    /// Its precision.
    pub half: Half,
}

/// A ring of stages that chunks of operands come through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingShape {
    /// Chunks in shared memory.
    pub stages: usize,
    /// Whether every operand of a block is whole rounds of the ring, and so starts at its first stage.
    pub whole_rounds: bool,
}

/// `left · rightᵀ`, 64 rows of either; the right operand comes by chunks of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkedScores {
    /// Columns of both, which are summed over.
    pub depth: usize,
    /// Chunks of the left operand that are in registers.
    pub register_chunks: usize,
    /// Size of their vector of registers.
    pub query_fragment: usize,
    /// Whether it frees a chunk of what was multiplied before.
    pub frees_before: bool,
    /// What the chunks come through.
    pub ring: RingShape,
    /// The precision of the operands.
    pub half: Half,
}

/// `left · right`; the right operand comes by chunks of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkedProduct {
    /// Columns of the product.
    pub columns: usize,
    /// What the chunks come through.
    pub ring: RingShape,
    /// The precision of the operands.
    pub half: Half,
}

impl ChunkedProduct {
    /// Size of the product's vector of registers.
    pub const fn fragment(&self) -> usize {
        registers(self.columns / 2)
    }
}

/// Words of used keys: 4 a block, for three blocks.
pub(crate) const USED_WORDS: usize = 12;

/// How the warpgroups of a cube divide a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForwardTiles {
    /// Split-M: each has rows of queries.
    SplitM(SplitMTiles),
    /// Split-D: each has columns of the output.
    SplitD(SplitDTiles),
}

impl ForwardTiles {
    /// Queries of a tile.
    pub const fn rows(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.rows(),
            Self::SplitD(_) => SplitDTiles::ROWS,
        }
    }

    /// Keys of a block.
    pub const fn keys(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.keys,
            Self::SplitD(_) => SplitDTiles::KEYS,
        }
    }

    /// Whether the copy engine writes the output, where every tile has one head and no part.
    pub const fn stores_output_by_tma(&self) -> bool {
        match self {
            Self::SplitM(tiles) => tiles.stores_output_by_tma(),
            Self::SplitD(tiles) => tiles.stores_output_by_tma(),
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.shared_memory(),
            Self::SplitD(tiles) => tiles.shared_memory(),
        }
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.units(),
            Self::SplitD(_) => SplitDTiles::UNITS,
        }
    }
}
