//! The tiles of the `wgmma` engine's forward, and the products that these are made of, the backward's among them.

mod by_columns;
mod by_rows;

pub use self::by_columns::ColumnTiles;
pub use self::by_rows::RowTiles;
use burn::tensor::DType;

/// The half precisions that the matrix unit multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Half {
    /// Its name in PTX.
    pub const fn ptx(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    pub(crate) const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }
}

/// Bytes of a row of a subtile, 64 halves: what the 128-byte swizzle permutes.
pub(crate) const ROW_BYTES: usize = 128;

/// Columns of a subtile.
pub(crate) const SUBTILE: usize = 64;

/// Rows of one matrix product.
pub(crate) const PRODUCT_ROWS: usize = 64;

/// Threads of a warpgroup.
pub(crate) const WARPGROUP: usize = 128;

/// Whether rows of so many columns are whole subtiles, which the copy engine then brings by one box.
pub(crate) const fn is_whole(columns: usize) -> bool {
    columns.is_multiple_of(SUBTILE)
}

/// Bytes of shared memory that a cube may take on Hopper.
const SHARED_MEMORY: usize = 232_448;

/// Bytes of it that suffice for barriers and the like.
const SMALL_BYTES: usize = 512;

/// A warpgroup's part of a tile's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OutputShape {
    /// Columns that the warpgroup has.
    pub columns: usize,
    /// Columns that the output has.
    pub value_dim: usize,
    /// From a subtile in shared memory to the next.
    pub subtile_bytes: usize,
    /// Nothing else is in its place there.
    pub own_place: bool,
    /// Its precision.
    pub half: Half,
}

/// `left · rightᵀ`, both in shared memory in subtiles of their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScoreProduct {
    /// Columns of both, which are summed over.
    pub depth: usize,
    /// Rows of a subtile of the left operand.
    pub left_rows: usize,
    /// Rows of the right operand: columns of the product.
    pub right_rows: usize,
    /// The precision of the operands.
    pub half: Half,
}

impl ScoreProduct {
    /// Size of the product's vector of registers.
    pub const fn fragment(&self) -> usize {
        registers(self.right_rows / 2)
    }
}

/// `left · right`, the left operand in registers, the right one in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of the right operand, which are summed over.
    pub depth: usize,
    /// Columns of the product.
    pub columns: usize,
    /// The precision of the operands.
    pub half: Half,
}

impl Product {
    /// Sizes of the vectors of registers of the left operand, and of the product.
    pub const fn fragments(&self) -> [usize; 2] {
        [registers(self.depth / 4), registers(self.columns / 2)]
    }
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

/// A vector of registers has a power of two of them.
pub(super) const fn registers(used: usize) -> usize {
    used.next_power_of_two()
}

/// Words of used keys: 4 a block, for three blocks.
pub(crate) const USED_WORDS: usize = 12;

/// How the warpgroups of a cube divide a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForwardTiles {
    /// By rows of queries.
    Rows(RowTiles),
    /// By columns of the output.
    Columns(ColumnTiles),
}

impl ForwardTiles {
    /// Queries of a tile.
    pub const fn rows(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.rows(),
            Self::Columns(_) => ColumnTiles::ROWS,
        }
    }

    /// Keys of a block.
    pub const fn keys(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.keys,
            Self::Columns(_) => ColumnTiles::KEYS,
        }
    }

    /// Whether the copy engine writes the output, where every tile has one head and no part.
    pub const fn boxes_output(&self) -> bool {
        match self {
            Self::Rows(tiles) => tiles.boxes_output(),
            Self::Columns(tiles) => tiles.boxes_output(),
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.shared_memory(),
            Self::Columns(tiles) => tiles.shared_memory(),
        }
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.units(),
            Self::Columns(_) => ColumnTiles::UNITS,
        }
    }
}
