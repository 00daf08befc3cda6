//! The sizes of the scores and of the output that one warp computes. This module is for kernels whose warps divide the
//! rows (split-M) or the keys (split-N).

use crate::types::quantized::CodeFormat;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::nvidia::{Half, registers};

/// The number of columns per `mma` step. Operands are padded with zeros to whole steps.
pub(super) const STEP: usize = 16;

/// The sizes of a warp's scores and of its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WarpTiles {
    /// The number of 16-row fragments of queries: 1 or 2. With two fragments, the warp loads each row of K or V once
    /// and multiplies both fragments by the row.
    pub fragments: usize,
    /// The number of keys per block.
    pub keys: usize,
    /// The number of columns of Q and K that the warp multiplies.
    pub depth: usize,
    /// The number of output columns, padded to whole steps of 16.
    pub columns: usize,
    /// The half precision type of the operands.
    pub half: Half,
    /// The format of [quantized](crate::quantized) K and V, or `None` for floats.
    pub codes: Option<CodeFormat>,
}

impl WarpTiles {
    /// The number of query rows that a warp computes.
    pub const fn rows(&self) -> usize {
        FRAGMENT_ROWS * self.fragments
    }

    /// The number of 16-column steps in the output.
    pub const fn steps(&self) -> usize {
        self.columns / STEP
    }

    /// The lengths of the register vectors of S, P and O for one fragment (16 query rows).
    pub const fn fragment_vectors(&self) -> [usize; 3] {
        [
            registers(self.keys / 2),
            registers(self.keys / 4),
            registers(self.columns / 2),
        ]
    }

    /// The lengths of the register vectors of S, P and O for all fragments of the warp.
    pub const fn vectors(&self) -> [usize; 3] {
        let [s, p, o] = self.fragment_vectors();
        let all = self.fragments;
        [all * s, all * p, all * o]
    }
}
