//! The tiles of the forward whose warps have rows, and what follows from them.

use super::warp::WarpTiles;
use cube_kit::hopper::{Half, ROW_BYTES, SUBTILE};

/// Columns of a step of a product, to which operands are filled up with zeros.
pub(super) const STEP: usize = 16;

/// Tiles of the forward whose warps have rows of the queries, and all columns of their output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SplitMTiles {
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// Their precision.
    pub half: Half,
    /// Warps of a cube.
    pub warps: usize,
    /// Fragments of 16 rows that a warp has: 1 or 2, which read an operand's rows once for both.
    pub fragments: usize,
    /// Keys of a block: 32, 64 or 128.
    pub keys: usize,
}

impl SplitMTiles {
    /// Blocks of keys, and of values, in shared memory: one is multiplied, the next is on its way.
    const STAGES: usize = 2;

    /// Queries of a tile.
    pub const fn rows(&self) -> usize {
        self.warps * self.warp_rows()
    }

    /// Queries of a warp.
    pub const fn warp_rows(&self) -> usize {
        self.warp().rows()
    }

    /// A warp's part of a block.
    pub const fn warp(&self) -> WarpTiles {
        WarpTiles {
            fragments: self.fragments,
            keys: self.keys,
            depth: self.head_dim,
            columns: self.value_dim.next_multiple_of(STEP),
            half: self.half,
            reads_words: false,
        }
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        32 * self.warps
    }

    /// Bytes of a block of keys.
    pub const fn key_bytes(&self) -> usize {
        self.keys * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// Bytes of a block of values.
    pub const fn value_bytes(&self) -> usize {
        self.keys * self.value_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// Where the blocks of keys start.
    pub const fn keys_at(&self) -> usize {
        self.rows() * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// Where the blocks of values start.
    pub const fn values_at(&self) -> usize {
        self.keys_at() + Self::STAGES * self.key_bytes()
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        self.values_at() + Self::STAGES * self.value_bytes()
    }

    /// Sizes of the vectors of registers of S, P and O of a fragment, and of all of a warp's.
    pub const fn vectors(&self) -> [usize; 6] {
        let [s, p, o] = self.warp().fragment_vectors();
        let [all_s, all_p, all_o] = self.warp().vectors();
        [s, p, o, all_s, all_p, all_o]
    }
}
