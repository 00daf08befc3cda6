//! Where things are in shared memory where either warpgroup has half of the output's columns.

use super::{ChunkedScores, OutputShape, RingShape, USED_WORDS};
use cube_kit::hopper::{Half, PRODUCT_ROWS, ROW_BYTES, SUBTILE, WARPGROUP, is_whole, registers};

/// Registers a thread of the output, of scores and of queries together: the others need the rest.
const QUERY_REGISTERS: usize = 192;

/// Registers a thread of a chunk of queries: 64 rows and 64 columns of halves.
const QUERY_CHUNK_REGISTERS: usize = 16;

/// Each warpgroup has all rows and half of the output's columns: `forward/split_d.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SplitDTiles {
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Chunks in shared memory.
    pub stages: usize,
}

impl SplitDTiles {
    /// Queries of a tile.
    pub const ROWS: usize = PRODUCT_ROWS;
    /// Keys of a block: each warpgroup has half of its scores.
    pub const KEYS: usize = 128;
    /// Warpgroups that multiply.
    pub const WARPGROUPS: usize = 2;
    /// Threads of a cube.
    pub const UNITS: usize = WARPGROUP * (Self::WARPGROUPS + 1);
    /// Keys of a chunk of values.
    pub const VALUE_KEYS: usize = 32;
    /// Bytes of a stage: a chunk of keys has 64 columns of 128 keys.
    pub const STAGE_BYTES: usize = Self::KEYS * ROW_BYTES;
    /// Bytes of half of P: 64 rows and 64 keys.
    pub const HALF_BYTES: usize = PRODUCT_ROWS * ROW_BYTES;

    /// Chunks of a block of keys, which are subtiles of a row.
    pub const fn key_chunks(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// Columns of the output that a warpgroup has.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.div_ceil(2).next_multiple_of(8)
    }

    /// Subtiles of these.
    pub const fn value_subtiles(&self) -> usize {
        self.value_columns().div_ceil(SUBTILE)
    }

    /// Chunks of a block of values, one after the other for either warpgroup.
    pub const fn value_chunks(&self) -> usize {
        Self::WARPGROUPS * Self::KEYS / Self::VALUE_KEYS
    }

    /// Bytes of a chunk of values.
    pub const fn value_bytes(&self) -> usize {
        Self::VALUE_KEYS * ROW_BYTES * self.value_subtiles()
    }

    /// Whether the output leaves through the queries' place in shared memory: it must fit, and a warpgroup's
    /// part must not share a subtile with the other's.
    pub const fn stores_output_by_tma(&self) -> bool {
        self.value_columns().is_multiple_of(SUBTILE)
            && self.value_dim.is_multiple_of(8)
            && Self::WARPGROUPS * self.value_subtiles() <= self.key_chunks()
    }

    /// What a warpgroup has of the output.
    pub const fn output_shape(&self, stored_by_tma: bool) -> OutputShape {
        OutputShape {
            columns: self.value_columns(),
            width: self.value_dim,
            stored_by_tma,
            subtile_bytes: PRODUCT_ROWS * ROW_BYTES,
            own_place: false,
            half: self.half,
        }
    }

    /// Whether a chunk of values is one box.
    pub const fn has_whole_values(&self) -> bool {
        is_whole(self.value_dim) && is_whole(self.value_columns())
    }

    /// Whether a block's last chunk of values needs the stage of its first.
    pub const fn frees_first_chunk_at_once(&self) -> bool {
        self.value_chunks() > self.stages
    }

    /// Where the stages start.
    pub const fn stages_at(&self) -> usize {
        Self::ROWS * self.key_chunks() * ROW_BYTES
    }

    /// Where P's two buffers start.
    pub const fn probabilities_at(&self) -> usize {
        self.stages_at() + self.stages * Self::STAGE_BYTES
    }

    /// Where the two buffers start in which the warpgroups tell each other 64 numbers each.
    pub const fn exchange_at(&self) -> usize {
        self.probabilities_at() + 4 * Self::HALF_BYTES
    }

    /// Where the barriers start: full and empty of every stage, and of the queries.
    pub const fn barriers_at(&self) -> usize {
        self.exchange_at() + 4 * 4 * Self::ROWS
    }

    /// Where the words start in which a bit stands for a key that somebody sees.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (2 * self.stages + 2)
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// Chunks of the queries that stay in registers, as far as these go: shared memory is the bound, and has
    /// each chunk read twice a block.
    pub const fn register_chunks(&self) -> usize {
        let free = QUERY_REGISTERS - Self::KEYS / 4 - self.value_columns() / 2;
        let fit = free / QUERY_CHUNK_REGISTERS;
        if fit < self.key_chunks() {
            fit
        } else {
            self.key_chunks()
        }
    }

    /// Size of their vector of registers.
    pub const fn query_fragment(&self) -> usize {
        registers(QUERY_CHUNK_REGISTERS * self.register_chunks())
    }

    /// Whether blocks of keys and of values are whole rounds of the ring.
    pub const fn has_whole_rounds(&self) -> bool {
        self.key_chunks().is_multiple_of(self.stages)
            && self.value_chunks().is_multiple_of(self.stages)
    }

    /// The ring of chunks of keys and of values.
    pub const fn ring(&self) -> RingShape {
        RingShape {
            stages: self.stages,
            whole_rounds: self.has_whole_rounds(),
        }
    }

    /// The product that makes S.
    pub const fn chunked_scores(&self) -> ChunkedScores {
        ChunkedScores {
            depth: self.head_dim,
            register_chunks: self.register_chunks(),
            query_fragment: self.query_fragment(),
            frees_before: false,
            ring: self.ring(),
            half: self.half,
        }
    }

    /// Sizes of the vectors of registers of S, of the first queries, and of O.
    pub const fn fragments(&self) -> [usize; 3] {
        [
            Self::KEYS / 4,
            self.query_fragment(),
            self.output_fragment(),
        ]
    }

    /// Size of the vector of registers of O.
    pub const fn output_fragment(&self) -> usize {
        registers(self.value_columns() / 2)
    }
}
