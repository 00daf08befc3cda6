//! The tiles of the split-N forward, for few query rows. The warps of a CTA divide the keys.

use super::warp::{STEP, WarpTiles};
use crate::types::quantized::CodeFormat;
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE, registers};

/// The bytes of an f32.
const FLOAT: usize = 4;

/// The tiles of the forward for few rows. Every warp processes all rows of the tile. A *key group* is one or two warps.
/// A CTA has `key_groups` key groups, and each key group processes every `key_groups`-th block of keys. The warps of a
/// key group divide the columns of all operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaSplitNTiles {
    /// The number of columns of Q and K.
    pub head_dim: usize,
    /// The number of columns of V.
    pub value_dim: usize,
    /// The half precision type of Q and of the output. K and V have the same type, unless they are quantized.
    pub half: Half,
    /// The format of [quantized](crate::quantized) K and V, or `None` for floats.
    pub codes: Option<CodeFormat>,
    /// The number of 16-row fragments in the tile: 1 or 2.
    pub fragments: usize,
    /// The number of key groups per CTA. Each key group processes every `key_groups`-th block of keys.
    pub key_groups: usize,
    /// The number of warps per key group: 1 or 2. If a group has two warps, each warp sums `q·k` over half of the
    /// columns, and the two warps exchange and add these partial scores.
    pub column_groups: usize,
    /// The number of keys per block: 16 or 32.
    pub keys: usize,
    /// The number of stages per warp, at least 2. A stage is a shared-memory buffer for one block of K and V. The warp
    /// multiplies the block in one stage while the copies to all other stages are in flight.
    pub stages: usize,
}

impl MmaSplitNTiles {
    /// The number of rows per tile.
    pub const fn rows(&self) -> usize {
        self.warp().rows()
    }

    /// The number of warps per CTA.
    pub const fn warps(&self) -> usize {
        self.key_groups * self.column_groups
    }

    /// The number of threads per CTA.
    pub const fn units(&self) -> usize {
        32 * self.warps()
    }

    /// The number of columns of Q and K that each warp multiplies. Zeros pad the columns to whole steps of 16.
    pub const fn key_columns(&self) -> usize {
        self.head_dim.div_ceil(STEP * self.column_groups) * STEP
    }

    /// The number of columns of V that each warp multiplies, which is also the number of output columns that it
    /// computes. Zeros pad the columns to whole steps of 16.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.div_ceil(STEP * self.column_groups) * STEP
    }

    /// The sizes of the scores and of the output that one warp computes.
    pub const fn warp(&self) -> WarpTiles {
        WarpTiles {
            fragments: self.fragments,
            keys: self.keys,
            depth: self.key_columns(),
            columns: self.value_columns(),
            half: self.half,
            codes: self.codes,
        }
    }

    /// Converts a number of columns of K or V to a number of 16-bit elements. Two codes fill one such element.
    pub const fn in_halves(&self, columns: usize) -> usize {
        match self.codes {
            Some(_) => columns / 2,
            None => columns,
        }
    }

    /// The bytes of `columns` columns of a block of K or V, with all rows of the block.
    const fn block_bytes(&self, columns: usize) -> usize {
        self.keys * self.in_halves(columns).div_ceil(SUBTILE) * ROW_BYTES
    }

    /// The bytes of the query columns that one warp multiplies.
    pub const fn query_bytes(&self) -> usize {
        self.rows() * self.key_columns().div_ceil(SUBTILE) * ROW_BYTES
    }

    /// The bytes of a warp's columns in a block of K.
    pub const fn key_bytes(&self) -> usize {
        self.block_bytes(self.key_columns())
    }

    /// The bytes of a warp's columns in a block of V.
    pub const fn value_bytes(&self) -> usize {
        self.block_bytes(self.value_columns())
    }

    /// The bytes of a stage (shared-memory buffer). A stage holds the warp's columns of a block of K. Behind them, the
    /// stage holds the warp's columns of a block of V.
    pub const fn stage_bytes(&self) -> usize {
        self.key_bytes() + self.value_bytes()
    }

    /// The bytes of a warp's output in f32. At the end, the output overwrites the warp's buffers for K and V.
    pub const fn output_bytes(&self) -> usize {
        self.rows() * self.value_columns() * FLOAT
    }

    /// The bytes of shared memory per warp. This memory first holds the warp's blocks of K and V, and at the end the warp's
    /// output.
    pub const fn warp_bytes(&self) -> usize {
        let stages = self.stages * self.stage_bytes();
        let output = self.output_bytes();
        if stages < output { output } else { stages }
    }

    /// The bytes of the partial scores that one warp of a key group passes to the other warp of the group. The two
    /// warps sum `q·k` over different columns. If a group has one warp, the number is 0.
    pub const fn exchange_bytes(&self) -> usize {
        match self.column_groups {
            1 => 0,
            _ => self.rows() * self.keys * FLOAT,
        }
    }

    /// The byte offset of the warps' stages (buffers for K and V) in shared memory. The stages lie behind the queries.
    pub const fn stages_at(&self) -> usize {
        self.column_groups * self.query_bytes()
    }

    /// The byte offset in shared memory of the buffers for the exchange of partial scores. Each warp has two such
    /// buffers.
    pub const fn exchange_at(&self) -> usize {
        self.stages_at() + self.warps() * self.warp_bytes()
    }

    /// The byte offset in shared memory of the row maxima. Each key group (one or two warps that process the same keys)
    /// stores its own row maxima there.
    pub const fn references_at(&self) -> usize {
        self.exchange_at() + 2 * self.warps() * self.exchange_bytes()
    }

    /// The byte offset in shared memory of the row sums. Each key group (one or two warps that process the same keys)
    /// stores its own row sums there.
    pub const fn sums_at(&self) -> usize {
        self.references_at() + FLOAT * self.key_groups * self.rows()
    }

    /// The bytes of shared memory per CTA.
    pub const fn shared_memory(&self) -> usize {
        self.sums_at() + FLOAT * self.key_groups * self.rows()
    }

    /// The number of 16-column steps of the output that one warp combines at the end. For these steps, the warp adds
    /// the outputs of all key groups.
    pub const fn part_steps(&self) -> usize {
        self.warp().steps().div_ceil(self.key_groups)
    }

    /// The lengths of six register vectors. The first three hold S, P and the combined output of one fragment. The last
    /// three hold S, P and O of all fragments of a warp.
    pub const fn vectors(&self) -> [usize; 6] {
        let [s, p, _] = self.warp().fragment_vectors();
        let [all_s, all_p, all_o] = self.warp().vectors();
        let part = registers(self.part_steps() * STEP / 2);
        [s, p, part, all_s, all_p, all_o]
    }
}
