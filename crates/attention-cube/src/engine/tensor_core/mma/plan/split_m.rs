//! The tiles of the split-M forward. The warps divide the rows of a tile.

use super::warp::{STEP, WarpTiles};
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE};

/// The tiles of the split-M forward. Each warp has some queries of the tile, and computes all columns of the output of
/// these queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaSplitMTiles {
    /// The number of columns of Q and K.
    pub head_dim: usize,
    /// The number of columns of V.
    pub value_dim: usize,
    /// The half precision type of the operands.
    pub half: Half,
    /// The number of warps per CTA.
    pub warps: usize,
    /// The number of 16-row fragments of queries per warp: 1 or 2. With two fragments, the warp loads each row of K or
    /// V once and multiplies both fragments by the row.
    pub fragments: usize,
    /// The number of keys per block: 32, 64 or 128.
    pub keys: usize,
}

impl MmaSplitMTiles {
    /// The number of blocks of K in shared memory, and also the number of blocks of V. The warps multiply one block
    /// while the copies of the next block are in flight (double buffering).
    const STAGES: usize = 2;

    /// The number of queries per tile.
    pub const fn rows(&self) -> usize {
        self.warps * self.warp_rows()
    }

    /// The number of queries per warp.
    pub const fn warp_rows(&self) -> usize {
        self.warp().rows()
    }

    /// The sizes of the scores and of the output that one warp computes.
    pub const fn warp(&self) -> WarpTiles {
        WarpTiles {
            fragments: self.fragments,
            keys: self.keys,
            depth: self.head_dim,
            columns: self.value_dim.next_multiple_of(STEP),
            half: self.half,
            codes: None,
        }
    }

    /// The number of threads per CTA.
    pub const fn units(&self) -> usize {
        32 * self.warps
    }

    /// The bytes of a block of K.
    pub const fn key_bytes(&self) -> usize {
        self.keys * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// The bytes of a block of V.
    pub const fn value_bytes(&self) -> usize {
        self.keys * self.value_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// The byte offset of the blocks of K in shared memory.
    pub const fn keys_at(&self) -> usize {
        self.rows() * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// The byte offset of the blocks of V in shared memory.
    pub const fn values_at(&self) -> usize {
        self.keys_at() + Self::STAGES * self.key_bytes()
    }

    /// The bytes of shared memory per CTA.
    pub const fn shared_memory(&self) -> usize {
        self.values_at() + Self::STAGES * self.value_bytes()
    }

    /// The lengths of six register vectors: S, P and O of one fragment, then S, P and O of all fragments of a warp.
    pub const fn vectors(&self) -> [usize; 6] {
        let [s, p, o] = self.warp().fragment_vectors();
        let [all_s, all_p, all_o] = self.warp().vectors();
        [s, p, o, all_s, all_p, all_o]
    }
}
