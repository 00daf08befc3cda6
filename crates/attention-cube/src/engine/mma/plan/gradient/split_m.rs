//! Where things are in shared memory where each warp has rows and all columns of their gradients.

use crate::engine::mma::plan::split_m::STEP;
use crate::math::side::{Side, Sums};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::hopper::{Half, ROW_BYTES, SUBTILE, registers};

/// Each warp has rows, and all columns of their gradients: `backward/split_m.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientSplitMTiles {
    /// What the rows are.
    pub side: Side,
    /// What is summed.
    pub sums: Sums,
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Numbers that come with a query: its logsumexp and Δ, or its reference, Δ, and the logarithm of the sum by the reference.
    pub terms: usize,
    /// Warps of a cube.
    pub warps: usize,
    /// Fragments of 16 rows that a warp has: 1 or 2, which read an operand's rows once for both.
    pub fragments: usize,
    /// Rows of a block of the other side, the columns of the scores: 16, 32 or 64.
    pub columns: usize,
}

impl GradientSplitMTiles {
    /// Blocks in shared memory: one is multiplied, the next is on its way.
    const STAGES: usize = 2;

    /// Rows of a tile.
    pub const fn rows(&self) -> usize {
        self.warps * self.warp_rows()
    }

    /// Rows of a warp.
    pub const fn warp_rows(&self) -> usize {
        FRAGMENT_ROWS * self.fragments
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        32 * self.warps
    }

    /// Bytes of so many rows of queries or keys.
    const fn dot_bytes(&self, rows: usize) -> usize {
        rows * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// Bytes of so many rows of values.
    const fn value_bytes(&self, rows: usize) -> usize {
        rows * self.value_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// Bytes of the queries' terms that come with a block of these, in f32.
    const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 4 * self.terms * self.columns,
        }
    }

    /// Where the values that are held start, behind the dots.
    pub const fn stationary_values_at(&self) -> usize {
        self.dot_bytes(self.rows())
    }

    /// Where the first block starts, behind the values that are held where these are needed.
    pub const fn blocks_at(&self) -> usize {
        let values = match self.sums.has_dots() {
            true => self.value_bytes(self.rows()),
            false => 0,
        };
        self.stationary_values_at() + values
    }

    /// Where in a block its values start, behind its dots.
    pub const fn block_values_at(&self) -> usize {
        self.dot_bytes(self.columns)
    }

    /// Where in a block its terms start.
    pub const fn block_terms_at(&self) -> usize {
        self.block_values_at() + self.value_bytes(self.columns)
    }

    /// From a block to the next, whose rows start at a multiple of a subtile's.
    pub const fn block_bytes(&self) -> usize {
        (self.block_terms_at() + self.term_bytes()).next_multiple_of(ROW_BYTES)
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        self.blocks_at() + Self::STAGES * self.block_bytes()
    }

    /// Columns of the dots' gradient in registers.
    pub const fn dot_columns(&self) -> usize {
        self.head_dim.next_multiple_of(STEP)
    }

    /// Columns of the values' gradient in registers.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.next_multiple_of(STEP)
    }

    /// Sizes of the vectors of registers of a fragment, of S and dP, of P and dS, and of the gradients; and of all of a warp's.
    pub const fn vectors(&self) -> [usize; 8] {
        let (s, p) = (registers(self.columns / 2), registers(self.columns / 4));
        let dots = registers(self.dot_columns() / 2);
        let values = registers(self.value_columns() / 2);
        let all = self.fragments;
        [
            s,
            p,
            dots,
            values,
            all * s,
            all * p,
            all * dots,
            all * values,
        ]
    }
}
