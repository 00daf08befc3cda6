//! The split-D tiles of a forward, and their layout in shared memory. Each warpgroup has all 64 queries of the tile,
//! and computes half of the columns of their output.

use super::shapes::{ChunkedScores, OutputShape, RingShape, USED_WORDS};
use cube_kit::hopper::{PRODUCT_ROWS, WARPGROUP};
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE, is_whole, registers};

/// The largest number of registers per thread for O, S and the query chunks together.
const QUERY_REGISTERS: usize = 192;

/// The number of registers per thread for one chunk of queries in a warpgroup. A chunk has 64 rows and 64 columns in
/// half precision.
const QUERY_CHUNK_REGISTERS: usize = 16;

/// Split-D tiles: each warpgroup has all rows of the tile, and computes half of the output's columns
/// (`forward/split_d.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WgmmaSplitDTiles {
    /// The number of columns of Q and K.
    pub head_dim: usize,
    /// The number of columns of V.
    pub value_dim: usize,
    /// The half-precision type of the operands.
    pub half: Half,
    /// The number of stages (shared-memory buffers) in the ring. Each stage holds one chunk of K or V.
    pub stages: usize,
}

impl WgmmaSplitDTiles {
    /// The number of queries in a tile.
    pub const ROWS: usize = PRODUCT_ROWS;
    /// The number of keys in a block. Each warpgroup computes the scores of half of these keys.
    pub const KEYS: usize = 128;
    /// The number of consumer warpgroups.
    pub const WARPGROUPS: usize = 2;
    /// The number of threads in a CTA.
    pub const UNITS: usize = WARPGROUP * (Self::WARPGROUPS + 1);
    /// The number of keys in a chunk of V.
    pub const VALUE_KEYS: usize = 32;
    /// The bytes of a stage (the shared-memory buffer of one chunk). The largest chunks are those of K, with 64 columns
    /// of 128 keys.
    pub const STAGE_BYTES: usize = Self::KEYS * ROW_BYTES;
    /// The bytes of the half of P that one warpgroup computes: 64 queries and 64 keys.
    pub const HALF_BYTES: usize = PRODUCT_ROWS * ROW_BYTES;

    /// The number of chunks in a block of keys. A chunk of keys is a subtile of 64 columns.
    pub const fn key_chunks(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// The number of output columns that a warpgroup computes.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.div_ceil(2).next_multiple_of(8)
    }

    /// The number of subtiles (64 columns each) in a warpgroup's part of the output.
    pub const fn value_subtiles(&self) -> usize {
        self.value_columns().div_ceil(SUBTILE)
    }

    /// The number of chunks in a block of V. One warpgroup uses the even chunks, and the other the odd chunks.
    pub const fn value_chunks(&self) -> usize {
        Self::WARPGROUPS * Self::KEYS / Self::VALUE_KEYS
    }

    /// The bytes of a chunk of V.
    pub const fn value_bytes(&self) -> usize {
        Self::VALUE_KEYS * ROW_BYTES * self.value_subtiles()
    }

    /// True if TMA can store the output from the shared memory that held the queries. The output must fit there. No
    /// subtile (64 columns) may have columns of both warpgroups.
    pub const fn stores_output_by_tma(&self) -> bool {
        self.value_columns().is_multiple_of(SUBTILE)
            && self.value_dim.is_multiple_of(8)
            && Self::WARPGROUPS * self.value_subtiles() <= self.key_chunks()
    }

    /// The rows and columns of the output that one warpgroup computes, and the way in which the warpgroup stores them.
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

    /// True if TMA can copy a chunk of V as one box, instead of one box per subtile.
    pub const fn has_whole_values(&self) -> bool {
        is_whole(self.value_dim) && is_whole(self.value_columns())
    }

    /// True if the last chunk of V of a block reuses the shared-memory buffer of the first chunk of V of the same
    /// block.
    pub const fn frees_first_chunk_at_once(&self) -> bool {
        self.value_chunks() > self.stages
    }

    /// The byte offset in shared memory of the ring. The ring's buffers hold chunks of K and V.
    pub const fn stages_at(&self) -> usize {
        Self::ROWS * self.key_chunks() * ROW_BYTES
    }

    /// The byte offset in shared memory of the two buffers of P.
    pub const fn probabilities_at(&self) -> usize {
        self.stages_at() + self.stages * Self::STAGE_BYTES
    }

    /// The byte offset in shared memory of two exchange buffers. Through these buffers, the warpgroups exchange one f32
    /// per row (row_max or row_sum).
    pub const fn exchange_at(&self) -> usize {
        self.probabilities_at() + 4 * Self::HALF_BYTES
    }

    /// The byte offset in shared memory of the barriers. Every stage of the ring has a full and an empty barrier, and
    /// so has the buffer of the queries.
    pub const fn barriers_at(&self) -> usize {
        self.exchange_at() + 4 * 4 * Self::ROWS
    }

    /// The byte offset in shared memory of the *used words*. Each bit of these words tells whether some row of the tile
    /// sees a certain key.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (2 * self.stages + 2)
    }

    /// The bytes of shared memory that a CTA uses.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// The number of query chunks that stay in registers, which is the number that fits the free registers. Shared
    /// memory bandwidth limits the kernel. Each chunk in registers saves reads of shared memory.
    pub const fn register_chunks(&self) -> usize {
        let free = QUERY_REGISTERS - Self::KEYS / 4 - self.value_columns() / 2;
        let fit = free / QUERY_CHUNK_REGISTERS;
        if fit < self.key_chunks() {
            fit
        } else {
            self.key_chunks()
        }
    }

    /// The size of the register vector that holds the query chunks.
    pub const fn query_fragment(&self) -> usize {
        registers(QUERY_CHUNK_REGISTERS * self.register_chunks())
    }

    /// True if the first chunk of every block (of K or of V) goes to the first buffer of the ring.
    pub const fn has_whole_rounds(&self) -> bool {
        self.key_chunks().is_multiple_of(self.stages)
            && self.value_chunks().is_multiple_of(self.stages)
    }

    /// The ring of shared-memory buffers through which the chunks of K and V pass.
    pub const fn ring(&self) -> RingShape {
        RingShape {
            stages: self.stages,
            whole_rounds: self.has_whole_rounds(),
        }
    }

    /// The GEMM that computes S.
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

    /// The lengths of three register vectors: for S, for the query chunks, and for O.
    pub const fn fragments(&self) -> [usize; 3] {
        [
            Self::KEYS / 4,
            self.query_fragment(),
            self.output_fragment(),
        ]
    }

    /// The size of the register vector that holds O.
    pub const fn output_fragment(&self) -> usize {
        registers(self.value_columns() / 2)
    }
}
