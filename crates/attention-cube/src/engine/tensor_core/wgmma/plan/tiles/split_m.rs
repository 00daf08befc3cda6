//! The split-M tiles of a forward, and their layout in shared memory. Each warpgroup computes the output of 64 queries.

use super::shapes::{OutputShape, SHARED_MEMORY, SMALL_BYTES, USED_WORDS};
use cube_kit::hopper::{PRODUCT_ROWS, Product, ScoreProduct, WARPGROUP};
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE, registers};

/// Split-M tiles: each warpgroup computes all columns of the output of 64 queries (`forward/split_m.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WgmmaSplitMTiles {
    /// The number of columns of Q and K.
    pub head_dim: usize,
    /// The number of columns of V.
    pub value_dim: usize,
    /// The half-precision type of the operands.
    pub half: Half,
    /// The number of consumer warpgroups.
    pub warpgroups: usize,
    /// The number of keys in a block.
    pub keys: usize,
    /// The number of shared-memory buffers (stages) for blocks of K. Blocks of V have equally many buffers.
    pub stages: usize,
    /// True if the warpgroups take turns to issue their wgmma (FlashAttention-3's ping-pong), so that one warpgroup
    /// computes its softmax during the GEMMs of another warpgroup.
    pub orders_warpgroups: bool,
    /// The number of shared-memory buffers (stages) for blocks of biases; 0 if threads load biases from global memory.
    pub bias_stages: usize,
}

impl WgmmaSplitMTiles {
    /// The number of queries in a tile.
    pub const fn rows(&self) -> usize {
        PRODUCT_ROWS * self.warpgroups
    }

    /// The number of threads in a CTA. A CTA has the consumer warpgroups and one producer warpgroup.
    pub const fn units(&self) -> usize {
        WARPGROUP * (self.warpgroups + 1)
    }

    /// The number of subtiles (64 columns each) that hold a row of Q or K.
    pub const fn key_subtiles(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// The number of subtiles (64 columns each) that hold a row of V.
    pub const fn value_subtiles(&self) -> usize {
        self.value_dim.div_ceil(SUBTILE)
    }

    /// The bytes of a block of keys.
    pub const fn key_bytes(&self) -> usize {
        self.keys * self.key_subtiles() * ROW_BYTES
    }

    /// The bytes of a block of V.
    pub const fn value_bytes(&self) -> usize {
        self.keys * self.value_subtiles() * ROW_BYTES
    }

    /// The byte offset in shared memory of the blocks of K.
    pub const fn keys_at(&self) -> usize {
        self.rows() * self.key_subtiles() * ROW_BYTES
    }

    /// The byte offset in shared memory of the blocks of V.
    pub const fn values_at(&self) -> usize {
        self.keys_at() + self.stages * self.key_bytes()
    }

    /// The bytes of a block of biases. Each row of the block is padded to whole subtiles of 64 keys.
    pub const fn bias_bytes(&self) -> usize {
        self.rows() * self.bias_subtiles() * ROW_BYTES
    }

    /// The number of subtiles (64 keys each) that hold a row of a block's biases.
    pub const fn bias_subtiles(&self) -> usize {
        self.keys.div_ceil(SUBTILE)
    }

    /// The byte offset in shared memory of the blocks of biases.
    pub const fn biases_at(&self) -> usize {
        self.values_at() + self.stages * self.value_bytes()
    }

    /// The byte offset in shared memory of the first byte after the blocks of K, V and biases.
    const fn blocks_end(&self) -> usize {
        self.biases_at() + self.bias_stages * self.bias_bytes()
    }

    const fn output_bytes(&self) -> usize {
        self.rows() * self.value_subtiles() * ROW_BYTES
    }

    /// True if shared memory has a separate staging buffer for the output. TMA can then copy the next tile's queries to
    /// shared memory while it stores the output.
    pub const fn has_output_place(&self) -> bool {
        self.blocks_end() + self.output_bytes() + SMALL_BYTES <= SHARED_MEMORY
    }

    /// The byte offset in shared memory of the output's staging buffer. If there is no separate buffer for the output,
    /// the offset is 0, so the output overwrites the queries.
    pub const fn output_at(&self) -> usize {
        if self.has_output_place() {
            self.blocks_end()
        } else {
            0
        }
    }

    /// The byte offset in shared memory of the barriers.
    ///
    /// The barriers come in this order: full and empty barriers of K, of V and of the queries; three barriers for the
    /// *used words*; full and empty barriers of the biases. Each bit of the used words tells whether some row of the
    /// tile sees a certain key.
    pub const fn barriers_at(&self) -> usize {
        if self.has_output_place() {
            self.blocks_end() + self.output_bytes()
        } else {
            self.blocks_end()
        }
    }

    /// The byte offset in shared memory of the *used words*. Each bit of these words tells whether some row of the tile
    /// sees a certain key.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (4 * self.stages + 5 + 2 * self.bias_stages)
    }

    /// The bytes of shared memory that a CTA uses.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// The number of columns of O that the registers of a warpgroup hold.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.next_multiple_of(8)
    }

    /// The lengths of three register vectors: for S, for P, and for O.
    pub const fn fragments(&self) -> [usize; 3] {
        [
            registers(self.keys / 2),
            registers(self.keys / 4),
            registers(self.value_columns() / 2),
        ]
    }

    /// The GEMM that computes S.
    pub const fn score_product(&self) -> ScoreProduct {
        ScoreProduct {
            depth: self.head_dim,
            left_rows: self.rows(),
            right_rows: self.keys,
            half: self.half,
        }
    }

    /// The shape of the GEMM that adds `P V` to O.
    pub const fn output_product(&self) -> Product {
        Product {
            depth: self.keys,
            columns: self.value_columns(),
            half: self.half,
        }
    }

    /// True if TMA can store the output, from a separate staging buffer or from the buffer of the queries.
    pub const fn stores_output_by_tma(&self) -> bool {
        self.value_dim.is_multiple_of(16)
            && (self.has_output_place() || self.value_subtiles() <= self.key_subtiles())
    }

    /// The rows and columns of the output that a warpgroup computes, and the way in which the warpgroup stores them.
    pub const fn output_shape(&self, stored_by_tma: bool) -> OutputShape {
        OutputShape {
            columns: self.value_columns(),
            width: self.value_dim,
            stored_by_tma,
            subtile_bytes: self.rows() * ROW_BYTES,
            own_place: self.has_output_place(),
            half: self.half,
        }
    }

    /// Two numbers of registers per thread: the number in the producer warpgroup, and the number in the consumer
    /// warpgroups.
    pub const fn thread_registers(&self) -> [usize; 2] {
        match self.warpgroups {
            1 => [56, 256 - 16],
            2 => [24, 240],
            _ => [32, 160],
        }
    }
}
