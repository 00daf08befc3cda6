//! What a warp has whose rows are its own, in kernels whose warps divide the rows, or the keys.

use super::split_m::STEP;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::hopper::{Half, registers};

/// A warp's part of a block's scores, and of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WarpTiles {
    /// Fragments of 16 rows: 1 or 2, which read an operand's rows once for both.
    pub fragments: usize,
    /// Keys of a block.
    pub keys: usize,
    /// Columns of queries and keys.
    pub depth: usize,
    /// Columns of the output, whole steps.
    pub columns: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Whether keys and values are [int8](crate::quantized), with scales of their own.
    pub reads_words: bool,
}

impl WarpTiles {
    /// Rows of the warp.
    pub const fn rows(&self) -> usize {
        FRAGMENT_ROWS * self.fragments
    }

    /// Times 16 columns of the output.
    pub const fn steps(&self) -> usize {
        self.columns / STEP
    }

    /// Sizes of the vectors of registers of S, P and O of a fragment.
    pub const fn fragment_vectors(&self) -> [usize; 3] {
        [
            registers(self.keys / 2),
            registers(self.keys / 4),
            registers(self.columns / 2),
        ]
    }

    /// Those of all fragments.
    pub const fn vectors(&self) -> [usize; 3] {
        let [s, p, o] = self.fragment_vectors();
        let all = self.fragments;
        [all * s, all * p, all * o]
    }
}
