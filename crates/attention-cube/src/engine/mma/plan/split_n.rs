//! The tiles of the forward whose warps divide the keys of few rows, and what follows from them.

use super::split_m::STEP;
use super::warp::WarpTiles;
use cube_kit::hopper::{Half, ROW_BYTES, SUBTILE, registers};

/// Bytes of a number in f32.
const FLOAT: usize = 4;

/// Tiles of the forward for few rows, which every warp has all of: a group of warps takes every so many-th block of keys, and its
/// warps divide the columns of all operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SplitNTiles {
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of queries and output, and of keys and values where these are none of int8.
    pub half: Half,
    /// Whether keys and values are [int8](crate::quantized).
    pub reads_words: bool,
    /// Fragments of 16 rows that the tile has: 1 or 2.
    pub fragments: usize,
    /// Groups of warps, which take turns at the blocks of keys.
    pub key_groups: usize,
    /// Warps of a group: 1, or 2 that add up each other's scores.
    pub column_groups: usize,
    /// Keys of a block: 16 or 32.
    pub keys: usize,
    /// Blocks of each warp in shared memory, at least 2: one is multiplied, the others are on their way.
    pub stages: usize,
}

impl SplitNTiles {
    /// Rows of a tile.
    pub const fn rows(&self) -> usize {
        self.warp().rows()
    }

    /// Warps of a cube.
    pub const fn warps(&self) -> usize {
        self.key_groups * self.column_groups
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        32 * self.warps()
    }

    /// Columns of queries and keys that a warp has, filled up with zeros to whole steps.
    pub const fn key_columns(&self) -> usize {
        self.head_dim.div_ceil(STEP * self.column_groups) * STEP
    }

    /// Columns of values and of the output that a warp has, filled up with zeros to whole steps.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.div_ceil(STEP * self.column_groups) * STEP
    }

    /// A warp's part of a block.
    pub const fn warp(&self) -> WarpTiles {
        WarpTiles {
            fragments: self.fragments,
            keys: self.keys,
            depth: self.key_columns(),
            columns: self.value_columns(),
            half: self.half,
            reads_words: self.reads_words,
        }
    }

    /// So many columns of keys or values, counted in halves.
    pub const fn in_halves(&self, columns: usize) -> usize {
        match self.reads_words {
            true => columns / 2,
            false => columns,
        }
    }

    /// Bytes of a warp's part of a block of an operand.
    const fn block_bytes(&self, columns: usize) -> usize {
        self.keys * self.in_halves(columns).div_ceil(SUBTILE) * ROW_BYTES
    }

    /// Bytes of the queries' columns that a warp has.
    pub const fn query_bytes(&self) -> usize {
        self.rows() * self.key_columns().div_ceil(SUBTILE) * ROW_BYTES
    }

    /// Bytes of a warp's columns of a block of keys.
    pub const fn key_bytes(&self) -> usize {
        self.block_bytes(self.key_columns())
    }

    /// Bytes of a warp's columns of a block of values.
    pub const fn value_bytes(&self) -> usize {
        self.block_bytes(self.value_columns())
    }

    /// Bytes of a stage: the keys of a block, and behind them its values.
    pub const fn stage_bytes(&self) -> usize {
        self.key_bytes() + self.value_bytes()
    }

    /// Bytes of a warp's output, which comes to lie where its stages were.
    pub const fn output_bytes(&self) -> usize {
        self.rows() * self.value_columns() * FLOAT
    }

    /// Bytes of a warp's stages.
    pub const fn warp_bytes(&self) -> usize {
        let stages = self.stages * self.stage_bytes();
        let output = self.output_bytes();
        if stages < output { output } else { stages }
    }

    /// Bytes of the scores that a warp tells its neighbour.
    pub const fn exchange_bytes(&self) -> usize {
        match self.column_groups {
            1 => 0,
            _ => self.rows() * self.keys * FLOAT,
        }
    }

    /// Where the warps' stages start, behind the queries.
    pub const fn stages_at(&self) -> usize {
        self.column_groups * self.query_bytes()
    }

    /// Where the scores that warps tell each other start, for two blocks.
    pub const fn exchange_at(&self) -> usize {
        self.stages_at() + self.warps() * self.warp_bytes()
    }

    /// Where the rows' references start, of each group of keys.
    pub const fn references_at(&self) -> usize {
        self.exchange_at() + 2 * self.warps() * self.exchange_bytes()
    }

    /// Where the rows' sums start, of each group of keys.
    pub const fn sums_at(&self) -> usize {
        self.references_at() + FLOAT * self.key_groups * self.rows()
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        self.sums_at() + FLOAT * self.key_groups * self.rows()
    }

    /// Times 16 columns of the output that a warp puts together of all groups'.
    pub const fn part_steps(&self) -> usize {
        self.warp().steps().div_ceil(self.key_groups)
    }

    /// Sizes of the vectors of registers of S and P of a fragment, of the output that is put together of one, and of S, P and O of
    /// all of a warp's.
    pub const fn vectors(&self) -> [usize; 6] {
        let [s, p, _] = self.warp().fragment_vectors();
        let [all_s, all_p, all_o] = self.warp().vectors();
        let part = registers(self.part_steps() * STEP / 2);
        [s, p, part, all_s, all_p, all_o]
    }
}
