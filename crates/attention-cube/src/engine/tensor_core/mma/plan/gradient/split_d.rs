//! The tiles and the shared memory of the split-D backward. The warps divide a gradient's columns.

use crate::engine::tensor_core::mma::plan::ring::Ring;
use crate::engine::tensor_core::mma::plan::warp::STEP;
use crate::math::side::{Side, Sums};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE, registers};

/// Tells which of the tile's own operands stay in shared memory during the main loop. The kernel copies each other
/// operand of the tile to shared memory again for every block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Resident {
    /// The tile's rows of Q or K stay in shared memory. The tile's rows of V or dO also stay there, if the kernel needs
    /// these rows.
    All,
    /// Only the tile's rows of Q or K stay in shared memory.
    QOrK,
    /// No operand of the tile stays in shared memory. During the main loop, the CTA keeps only the tile's gradient,
    /// which lies in registers.
    Nothing,
}

/// The tiles of the kernel in `backward/split_d.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaGradientSplitDTiles {
    /// Tells whether the tile's rows are queries or keys.
    pub side: Side,
    /// The gradients that the kernel computes.
    pub sums: Sums,
    /// The number of columns of Q and K.
    pub head_dim: usize,
    /// The number of columns of V.
    pub value_dim: usize,
    /// The half precision type of the operands.
    pub half: Half,
    /// The number of f32 per query that the kernel loads: 2 for LSE and delta, or 3 for row maximum, delta, and logarithm of
    /// the row sum.
    pub lse_delta: usize,
    /// The number of rows per tile: 64 or 128.
    pub rows: usize,
    /// The number of rows per streamed block: 64 or 128. Each row of the block gives a column of the scores.
    pub columns: usize,
    /// Tells which of the tile's own operands stay in shared memory during the main loop.
    pub resident: Resident,
    /// The number of columns in a chunk for the GEMM of S or dP, a multiple of a subtile's 64 columns.
    pub score_columns: usize,
    /// The number of rows in a chunk of the gradient GEMM's right operand.
    pub sum_rows: usize,
    /// The number of slots in the ring buffer for operand chunks: at least 2, and at most the number of chunks per block.
    pub slots: usize,
}

impl MmaGradientSplitDTiles {
    /// The number of warps per CTA.
    pub const WARPS: usize = 8;

    /// The number of threads per CTA.
    pub const UNITS: usize = 32 * Self::WARPS;

    /// The number of score columns that each warp computes for a block. A mask word has this number of bits.
    pub const PART: usize = 32;

    /// The number of gradient rows per warp.
    pub const SUM_ROWS: usize = 64;

    /// The number of 16-row fragments in a warp's gradient.
    pub const SUM_FRAGMENTS: usize = Self::SUM_ROWS / FRAGMENT_ROWS;

    /// The number of blocks whose LSE and delta are in shared memory at the same time.
    pub const TERM_STAGES: usize = 2;

    /// The number of groups of 32 columns in a block's scores. Each warp computes scores for one group.
    pub const fn part_groups(&self) -> usize {
        self.columns / Self::PART
    }

    /// The number of 16-row fragments in a warp's scores: 1 or 2.
    pub const fn score_fragments(&self) -> usize {
        self.rows * self.part_groups() / Self::WARPS / FRAGMENT_ROWS
    }

    /// The number of score rows per warp.
    pub const fn score_rows(&self) -> usize {
        FRAGMENT_ROWS * self.score_fragments()
    }

    /// The number of gradients that the kernel computes: 1 or 2. If the kernel computes two gradients, one half of the
    /// warps computes each gradient.
    pub const fn gradients(&self) -> usize {
        match self.sums {
            Sums::QOrK | Sums::Values => 1,
            Sums::Both => 2,
        }
    }

    /// The number of row groups (64 rows each) in a tile's gradient. Each warp computes gradient rows of one group.
    pub const fn row_groups(&self) -> usize {
        self.rows / Self::SUM_ROWS
    }

    /// The number of warps that compute one row group (64 rows) of a gradient. These warps divide the gradient's
    /// columns.
    pub const fn column_groups(&self) -> usize {
        Self::WARPS / self.gradients() / self.row_groups()
    }

    /// The number of columns of the gradient that the kernel computes. If the kernel computes two gradients, the number
    /// of columns of the wider gradient.
    const fn width(&self) -> usize {
        match self.sums {
            Sums::QOrK => self.head_dim,
            Sums::Values => self.value_dim,
            Sums::Both if self.head_dim < self.value_dim => self.value_dim,
            Sums::Both => self.head_dim,
        }
    }

    /// The number of 16-column steps in the part of a gradient that one warp computes.
    pub const fn steps(&self) -> usize {
        self.width().div_ceil(STEP * self.column_groups())
    }

    /// The number of subtiles (64 columns each) in a row of the gradient GEMM's right operand. Zeros pad the row, so
    /// that all warps compute an equal number of columns.
    pub const fn sum_subtiles(&self) -> usize {
        (STEP * self.steps() * self.column_groups()).div_ceil(SUBTILE)
    }

    /// The number of chunks of columns into which the GEMM of S divides a block of Q or K.
    pub const fn dot_chunks(&self) -> usize {
        self.head_dim.div_ceil(self.score_columns)
    }

    /// The number of chunks of columns into which the GEMM of dP divides a block of V or dO; 0 if the kernel does not
    /// need dP.
    pub const fn value_chunks(&self) -> usize {
        match self.sums.has_q_or_k() {
            true => self.value_dim.div_ceil(self.score_columns),
            false => 0,
        }
    }

    /// The number of chunks of rows into which the gradient GEMM divides a block.
    pub const fn sum_chunks(&self) -> usize {
        self.columns / self.sum_rows
    }

    /// The total number of chunks per block: for the GEMM of S, for the GEMM of dP, and for the gradient GEMM.
    pub const fn chunks(&self) -> usize {
        self.dot_chunks() + self.value_chunks() + self.sum_chunks()
    }

    /// The number of columns in the `chunk`-th chunk of an operand with `width` columns. Zeros pad the chunk to whole
    /// steps of 16 columns.
    pub const fn chunk_columns(&self, width: usize, chunk: usize) -> usize {
        let left = width.next_multiple_of(STEP) - chunk * self.score_columns;
        if left < self.score_columns {
            left
        } else {
            self.score_columns
        }
    }

    /// If `v_or_do`, true if the tile's rows of V or dO stay in shared memory. Else true if the tile's rows of Q or K
    /// stay in shared memory.
    pub const fn holds(&self, v_or_do: bool) -> bool {
        match self.resident {
            Resident::All => true,
            Resident::QOrK => !v_or_do,
            Resident::Nothing => false,
        }
    }

    /// The bytes that the tile's rows of Q or K take in shared memory, or 0 if these rows do not stay there.
    const fn dot_bytes(&self) -> usize {
        match self.holds(false) {
            true => self.rows * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES,
            false => 0,
        }
    }

    /// The bytes that the tile's rows of V or dO take in shared memory, or 0 if these rows do not stay there.
    const fn value_bytes(&self) -> usize {
        match self.sums.has_q_or_k() && self.holds(true) {
            true => self.rows * self.value_dim.div_ceil(SUBTILE) * ROW_BYTES,
            false => 0,
        }
    }

    /// The byte offset of the tile's rows of V or dO in shared memory, behind the tile's rows of Q or K.
    pub const fn stationary_values_at(&self) -> usize {
        self.dot_bytes()
    }

    /// The byte offset of P or dS in shared memory. If the kernel computes two gradients, dS comes first, and P follows.
    pub const fn factors_at(&self) -> usize {
        self.stationary_values_at() + self.value_bytes()
    }

    /// The bytes of P for one tile and one block. The bytes of dS are equally many.
    pub const fn factor_bytes(&self) -> usize {
        self.rows * self.columns / SUBTILE * ROW_BYTES
    }

    /// The byte offset of the ring buffer (the slots for operand chunks) in shared memory.
    pub const fn ring_at(&self) -> usize {
        self.factors_at() + self.gradients() * self.factor_bytes()
    }

    /// The byte offset of the tile's rows in a ring slot that holds a chunk for the GEMM of S or dP. The kernel uses
    /// this offset only if the tile's rows do not stay in shared memory during the main loop. The kernel then copies
    /// these rows to the slot, behind the chunk.
    pub const fn tile_rows_at(&self) -> usize {
        self.columns * self.score_columns / SUBTILE * ROW_BYTES
    }

    /// The bytes that a chunk has of one right operand of the gradient GEMMs. If the kernel computes two gradients, a
    /// chunk has rows of two right operands: first rows of Q, then rows of dO.
    pub const fn sum_bytes(&self) -> usize {
        self.sum_rows * self.sum_subtiles() * ROW_BYTES
    }

    /// The bytes of a slot of the ring buffer in shared memory. The largest chunk of an operand fits a slot.
    pub const fn slot_bytes(&self) -> usize {
        let streams = !self.holds(false) || (self.sums.has_q_or_k() && !self.holds(true));
        let rows = match streams {
            true => self.columns + self.rows,
            false => self.columns,
        };
        let scores = rows * self.score_columns / SUBTILE * ROW_BYTES;
        let sums = self.gradients() * self.sum_bytes();
        if scores < sums { sums } else { scores }
    }

    /// The bytes of the LSE and delta (f32) of a block of queries, or 0 if the streamed blocks are keys.
    pub const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 4 * self.lse_delta * self.columns,
        }
    }

    /// The byte offset of LSE and delta in shared memory.
    pub const fn lse_delta_at(&self) -> usize {
        self.ring_at() + self.slots * self.slot_bytes()
    }

    /// The byte offset of the *used bits*. A used bit marks a column of P or dS in which some row has a nonzero
    /// element. Each warp has four words of used bits for dS. If the kernel computes two gradients, each warp has four
    /// more words for P.
    pub const fn used_at(&self) -> usize {
        self.lse_delta_at() + Self::TERM_STAGES * self.term_bytes()
    }

    /// The bytes of the used bits of P, or of the used bits of dS. A used bit marks a column in which some row has a
    /// nonzero element.
    pub const USED_BYTES: usize = 16 * Self::WARPS;

    /// The sizes and offsets of the ring buffer in shared memory. Its barriers lie behind all other data.
    pub const fn ring(&self) -> Ring {
        Ring {
            chunks: self.chunks(),
            slots: self.slots,
            slot_bytes: self.slot_bytes(),
            slots_at: self.ring_at(),
            barriers_at: self.used_at() + self.gradients() * Self::USED_BYTES,
        }
    }

    /// The bytes of shared memory per CTA.
    pub const fn shared_memory(&self) -> usize {
        self.ring().end()
    }

    /// The number of threads per CTA. The method exists for code that also handles split-M tiles.
    pub const fn units(&self) -> usize {
        Self::UNITS
    }

    /// The lengths of five register vectors. The first two hold S (or dP) and P (or dS) of one fragment. The last three
    /// hold S (or dP), P (or dS) and the gradient of all fragments of a warp.
    pub const fn vectors(&self) -> [usize; 5] {
        let (s, p) = (Self::PART / 2, Self::PART / 4);
        let fragments = self.score_fragments();
        let gradient = Self::SUM_FRAGMENTS * self.steps() * STEP / 2;
        [s, p, fragments * s, fragments * p, registers(gradient)]
    }
}
