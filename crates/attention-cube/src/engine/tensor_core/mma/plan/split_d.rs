//! The tiles of the split-D forward. The warps divide the scores by rows and keys, and the output by rows and columns.

use super::ring::Ring;
use cube_kit::ampere::{BARRIER_BYTES, FRAGMENT_ROWS};
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE, registers};

/// The number of columns per `mma` step. Operands are padded with zeros to whole steps.
const STEP: usize = 16;

/// The tiles of the split-D forward. Chunks of K have some columns of a block, and chunks of V have some rows of a
/// block. All chunks pass through one ring of slots in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaSplitDTiles {
    /// The number of columns of Q and K.
    pub head_dim: usize,
    /// The number of columns of V.
    pub value_dim: usize,
    /// The half precision type of the operands.
    pub half: Half,
    /// The number of queries per tile: 32, 64 or 128.
    pub rows: usize,
    /// The number of keys per block: 64 or 128.
    pub keys: usize,
    /// The number of row groups. The warps of a row group compute different columns of the same output rows.
    pub row_groups: usize,
    /// The number of columns in a chunk of K, a multiple of a subtile's 64 columns.
    pub key_columns: usize,
    /// The number of rows of V in one chunk of V.
    pub value_keys: usize,
    /// The number of chunks that have the same `value_keys` rows of V. These chunks divide the columns of V among
    /// themselves.
    pub value_parts: usize,
    /// The number of slots in the ring buffer for chunks of K and V, at least 2.
    pub slots: usize,
    /// True if the queries stay in shared memory. Otherwise the kernel copies the queries again with every block of keys.
    pub holds_queries: bool,
    /// The number of buffers for P of a block: 1 or 2. With two buffers, a warp waits at one barrier fewer before it
    /// stores P.
    pub shares: usize,
}

impl MmaSplitDTiles {
    /// The number of warps per CTA.
    pub const WARPS: usize = 8;

    /// The number of threads per CTA.
    pub const UNITS: usize = 32 * Self::WARPS;

    /// The number of keys of a block for which each warp computes scores. A mask word has this number of bits.
    pub const SCORE_KEYS: usize = 32;

    /// The number of registers per thread in a score fragment.
    pub const SCORE_REGISTERS: usize = Self::SCORE_KEYS / 2;

    /// The number of key groups (32 keys each) in a block. Each warp computes the scores of some rows with the keys of
    /// one group.
    pub const fn key_groups(&self) -> usize {
        self.keys / Self::SCORE_KEYS
    }

    /// The number of 16-row fragments in a warp's scores: 1 or 2.
    pub const fn score_fragments(&self) -> usize {
        self.rows * self.key_groups() / Self::WARPS / FRAGMENT_ROWS
    }

    /// The number of score rows per warp.
    pub const fn score_rows(&self) -> usize {
        FRAGMENT_ROWS * self.score_fragments()
    }

    /// The number of 16-row fragments in a warp's output.
    pub const fn output_fragments(&self) -> usize {
        self.rows / self.row_groups / FRAGMENT_ROWS
    }

    /// The number of output rows per warp.
    pub const fn output_rows(&self) -> usize {
        FRAGMENT_ROWS * self.output_fragments()
    }

    /// The number of warps in a row group. These warps divide the output columns of the group's rows.
    pub const fn column_groups(&self) -> usize {
        Self::WARPS / self.row_groups
    }

    /// The number of 16-column steps that a warp computes per chunk of V.
    pub const fn part_steps(&self) -> usize {
        self.value_dim
            .div_ceil(STEP)
            .div_ceil(self.column_groups() * self.value_parts)
    }

    /// The number of 16-column steps in a warp's output.
    pub const fn value_steps(&self) -> usize {
        self.part_steps() * self.value_parts
    }

    /// The number of columns in a chunk of V, including columns of zeros that pad the chunk.
    pub const fn part_columns(&self) -> usize {
        STEP * self.part_steps() * self.column_groups()
    }

    /// The number of columns in the `chunk`-th chunk of K. Zeros pad the chunk to whole steps of 16 columns.
    pub const fn chunk_columns(&self, chunk: usize) -> usize {
        let left = self.head_dim.next_multiple_of(STEP) - chunk * self.key_columns;
        if left < self.key_columns {
            left
        } else {
            self.key_columns
        }
    }

    /// The number of chunks in a block of K.
    pub const fn key_chunks(&self) -> usize {
        self.head_dim.div_ceil(self.key_columns)
    }

    /// The number of chunks in a block of V. A chunk has `value_keys` rows and some of the columns. All chunks of the
    /// block's first `value_keys` rows precede the chunks of the next rows.
    pub const fn value_chunks(&self) -> usize {
        self.keys / self.value_keys * self.value_parts
    }

    /// The number of chunks that the warps read in one pass. In a pass, which is one main loop iteration, the warps
    /// multiply K of one block and V of the previous block.
    pub const fn chunks(&self) -> usize {
        self.key_chunks() + self.value_chunks()
    }

    /// The byte offset of the queries in a ring slot that holds a chunk of K. The queries lie behind the chunk. The
    /// kernel uses this offset only if the queries do not stay in shared memory. The kernel then copies the queries
    /// again with every block of keys.
    pub const fn chunk_queries_at(&self) -> usize {
        self.keys * self.key_columns / SUBTILE * ROW_BYTES
    }

    /// The bytes of a slot of the ring buffer in shared memory. The largest chunk of K or V fits a slot.
    pub const fn slot_bytes(&self) -> usize {
        let mut keys = self.chunk_queries_at();
        if !self.holds_queries {
            keys += self.rows * self.key_columns / SUBTILE * ROW_BYTES;
        }
        let values = self.value_keys * self.part_columns().div_ceil(SUBTILE) * ROW_BYTES;
        if keys < values { values } else { keys }
    }

    /// The byte offset of P in shared memory. P lies behind the queries, if the queries stay in shared memory.
    pub const fn probabilities_at(&self) -> usize {
        match self.holds_queries {
            true => self.rows * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES,
            false => 0,
        }
    }

    /// The bytes of P for one block.
    pub const fn probability_bytes(&self) -> usize {
        self.rows * self.keys / SUBTILE * ROW_BYTES
    }

    /// The sizes and offsets of the ring buffer for chunks of K and V. The slots lie behind P, and the barriers behind
    /// the data that the warps exchange.
    pub const fn ring(&self) -> Ring {
        Ring {
            chunks: self.chunks(),
            slots: self.slots,
            slot_bytes: self.slot_bytes(),
            slots_at: self.probabilities_at() + self.shares * self.probability_bytes(),
            barriers_at: self.meetings_at() + self.row_groups * Self::MEETING_BARRIERS,
        }
    }

    /// The byte offset in shared memory of the row maxima. Each key group (32 keys of a block) has its own row maxima.
    pub const fn maxima_at(&self) -> usize {
        self.probabilities_at()
            + self.shares * self.probability_bytes()
            + self.slots * self.slot_bytes()
    }

    /// The byte offset in shared memory of the factors that rescale the rows of the output.
    pub const fn factors_at(&self) -> usize {
        self.maxima_at() + 4 * self.key_groups() * self.rows
    }

    /// The byte offset in shared memory of the rescale flags. Each flag is for 16 rows of the output. The flag is 1 if
    /// the warps must rescale these rows, else 0.
    pub const fn moved_at(&self) -> usize {
        self.factors_at() + 4 * self.rows
    }

    /// The byte offset in shared memory of the *used bits*. A used bit marks a key for which some row has a nonzero
    /// probability. Each buffer of P has its own used bits.
    pub const fn used_at(&self) -> usize {
        (self.moved_at() + 4 * self.rows / FRAGMENT_ROWS).next_multiple_of(BARRIER_BYTES)
    }

    /// The bytes of the used bits of one block: four words per warp. A used bit marks a key for which some row has a
    /// nonzero probability.
    pub const USED_BYTES: usize = 16 * Self::WARPS;

    /// The byte offset in shared memory of the barriers of the row groups. A row group is the warps that compute the
    /// same output rows. Each row group has three barriers. A warp arrives at the first barrier when it has stored its
    /// row maxima. It arrives at the second when it has stored P, and at the third when it has finished the GEMM with
    /// P.
    pub const fn meetings_at(&self) -> usize {
        self.used_at() + self.shares * Self::USED_BYTES
    }

    /// The bytes of a row group's three barriers: row maxima stored, P stored, and GEMM with P finished.
    pub const MEETING_BARRIERS: usize = 3 * BARRIER_BYTES;

    /// The bytes of shared memory per CTA.
    pub const fn shared_memory(&self) -> usize {
        self.ring().end()
    }

    /// The number of threads per CTA.
    pub const fn units(&self) -> usize {
        Self::UNITS
    }

    /// The lengths of four register vectors: S and O of one fragment, then S and O of all fragments of a warp.
    pub const fn vectors(&self) -> [usize; 4] {
        let o = self.value_steps() * STEP / 2;
        let fragments = [self.score_fragments(), self.output_fragments()];
        [
            Self::SCORE_REGISTERS,
            registers(o),
            registers(fragments[0] * Self::SCORE_REGISTERS),
            registers(fragments[1] * o),
        ]
    }
}
