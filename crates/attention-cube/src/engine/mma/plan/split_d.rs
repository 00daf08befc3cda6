//! The tiles of the forward whose warps share rows and divide the output's columns, and what follows from them.

use super::ring::Ring;
use cube_kit::ampere::{BARRIER_BYTES, FRAGMENT_ROWS};
use cube_kit::hopper::{Half, ROW_BYTES, SUBTILE, registers};

/// Columns of a step of a product, to which operands are filled up with zeros.
const STEP: usize = 16;

/// Tiles of the forward whose warps have parts of the scores by rows and keys, and of the output by rows and columns. Keys come in
/// chunks of columns and values in chunks of rows, through one ring of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SplitDTiles {
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// Their precision.
    pub half: Half,
    /// Queries of a tile: 32, 64 or 128.
    pub rows: usize,
    /// Keys of a block: 64 or 128.
    pub keys: usize,
    /// Groups of rows that the output is divided into; the warps of a group divide its columns.
    pub row_groups: usize,
    /// Columns of a chunk of keys, whole subtiles.
    pub key_columns: usize,
    /// Keys of a chunk of values.
    pub value_keys: usize,
    /// Chunks in which such values come, each with a part of the columns.
    pub value_parts: usize,
    /// Slots of the ring, at least 2.
    pub slots: usize,
    /// Whether the queries stay in shared memory; else they come again by columns with every block's keys.
    pub holds_queries: bool,
    /// Blocks whose P there is room for: 1, or 2, which spares the warps of a row a meeting before they write it.
    pub shares: usize,
}

impl SplitDTiles {
    /// Warps of a cube.
    pub const WARPS: usize = 8;

    /// Threads of a cube.
    pub const UNITS: usize = 32 * Self::WARPS;

    /// Keys of a warp's scores: a word of a mask.
    pub const SCORE_KEYS: usize = 32;

    /// Registers of a fragment of scores.
    pub const SCORE_REGISTERS: usize = Self::SCORE_KEYS / 2;

    /// Groups of keys that a block's scores are divided into.
    pub const fn key_groups(&self) -> usize {
        self.keys / Self::SCORE_KEYS
    }

    /// Fragments of 16 rows that a warp has of the scores: 1 or 2.
    pub const fn score_fragments(&self) -> usize {
        self.rows * self.key_groups() / Self::WARPS / FRAGMENT_ROWS
    }

    /// Rows of a warp's scores.
    pub const fn score_rows(&self) -> usize {
        FRAGMENT_ROWS * self.score_fragments()
    }

    /// Fragments of 16 rows that a warp has of the output.
    pub const fn output_fragments(&self) -> usize {
        self.rows / self.row_groups / FRAGMENT_ROWS
    }

    /// Rows of a warp's output.
    pub const fn output_rows(&self) -> usize {
        FRAGMENT_ROWS * self.output_fragments()
    }

    /// Warps that take turns at the columns of the output.
    pub const fn column_groups(&self) -> usize {
        Self::WARPS / self.row_groups
    }

    /// Times 16 columns that a warp has of a chunk of values.
    pub const fn part_steps(&self) -> usize {
        self.value_dim
            .div_ceil(STEP)
            .div_ceil(self.column_groups() * self.value_parts)
    }

    /// Times 16 columns that a warp has of the output.
    pub const fn value_steps(&self) -> usize {
        self.part_steps() * self.value_parts
    }

    /// Columns of a chunk of values, filled up with zeros.
    pub const fn part_columns(&self) -> usize {
        STEP * self.part_steps() * self.column_groups()
    }

    /// Columns of the `chunk`-th chunk of keys, filled up with zeros to whole steps.
    pub const fn chunk_columns(&self, chunk: usize) -> usize {
        let left = self.head_dim.next_multiple_of(STEP) - chunk * self.key_columns;
        if left < self.key_columns {
            left
        } else {
            self.key_columns
        }
    }

    /// Chunks of a block of keys.
    pub const fn key_chunks(&self) -> usize {
        self.head_dim.div_ceil(self.key_columns)
    }

    /// Chunks of a block of values: of the first keys all parts, then of the next.
    pub const fn value_chunks(&self) -> usize {
        self.keys / self.value_keys * self.value_parts
    }

    /// Chunks of a pass: the keys of a block, and the values of the block before it.
    pub const fn chunks(&self) -> usize {
        self.key_chunks() + self.value_chunks()
    }

    /// Where in a chunk of keys the queries start, where these do not stay.
    pub const fn chunk_queries_at(&self) -> usize {
        self.keys * self.key_columns / SUBTILE * ROW_BYTES
    }

    /// Bytes of a slot, which any chunk fits.
    pub const fn slot_bytes(&self) -> usize {
        let mut keys = self.chunk_queries_at();
        if !self.holds_queries {
            keys += self.rows * self.key_columns / SUBTILE * ROW_BYTES;
        }
        let values = self.value_keys * self.part_columns().div_ceil(SUBTILE) * ROW_BYTES;
        if keys < values { values } else { keys }
    }

    /// Where P starts, behind the queries that stay.
    pub const fn probabilities_at(&self) -> usize {
        match self.holds_queries {
            true => self.rows * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES,
            false => 0,
        }
    }

    /// Bytes of a block's P.
    pub const fn probability_bytes(&self) -> usize {
        self.rows * self.keys / SUBTILE * ROW_BYTES
    }

    /// The ring, behind P; its barriers lie behind what the warps tell each other.
    pub const fn ring(&self) -> Ring {
        Ring {
            chunks: self.chunks(),
            slots: self.slots,
            slot_bytes: self.slot_bytes(),
            slots_at: self.probabilities_at() + self.shares * self.probability_bytes(),
            barriers_at: self.meetings_at() + self.row_groups * Self::MEETING_BARRIERS,
        }
    }

    /// Where the rows' maxima start, of each group of keys.
    pub const fn maxima_at(&self) -> usize {
        self.probabilities_at()
            + self.shares * self.probability_bytes()
            + self.slots * self.slot_bytes()
    }

    /// Where the rows' factors start.
    pub const fn factors_at(&self) -> usize {
        self.maxima_at() + 4 * self.key_groups() * self.rows
    }

    /// Where it is told of each 16 rows whether their references moved.
    pub const fn moved_at(&self) -> usize {
        self.factors_at() + 4 * self.rows
    }

    /// Where the bits of used keys start, of each block whose P there is.
    pub const fn used_at(&self) -> usize {
        (self.moved_at() + 4 * self.rows / FRAGMENT_ROWS).next_multiple_of(BARRIER_BYTES)
    }

    /// Bytes of the bits of used keys of a block, four words of each warp.
    pub const USED_BYTES: usize = 16 * Self::WARPS;

    /// Where the barriers start at which the warps of a row group tell that they are done with a step.
    pub const fn meetings_at(&self) -> usize {
        self.used_at() + self.shares * Self::USED_BYTES
    }

    /// Bytes of a row group's barriers: for maxima, for P, and for what was multiplied by it.
    pub const MEETING_BARRIERS: usize = 3 * BARRIER_BYTES;

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        self.ring().end()
    }

    /// Threads of a cube, for whoever has tiles of either kind.
    pub const fn units(&self) -> usize {
        Self::UNITS
    }

    /// Sizes of the vectors of registers of S and O of a fragment, and of all of a warp's.
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
