//! Where things are in shared memory where a warpgroup has rows of the output.

use super::{OutputShape, SHARED_MEMORY, SMALL_BYTES, USED_WORDS};
use cube_kit::hopper::{
    Half, PRODUCT_ROWS, Product, ROW_BYTES, SUBTILE, ScoreProduct, WARPGROUP, registers,
};

/// Each warpgroup has 64 rows of queries and all columns of the output: `forward/split_m.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SplitMTiles {
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Warpgroups that multiply.
    pub warpgroups: usize,
    /// Keys of a block.
    pub keys: usize,
    /// Blocks of keys, and blocks of values, in shared memory.
    pub stages: usize,
    /// Whether warpgroups issue their products in turns, so that one makes its softmax while the matrix unit is
    /// at another's products (FlashAttention-3's ping-pong).
    pub orders_warpgroups: bool,
    /// Blocks of biases in shared memory; 0 where threads read them themselves.
    pub bias_stages: usize,
}

impl SplitMTiles {
    /// Queries of a tile.
    pub const fn rows(&self) -> usize {
        PRODUCT_ROWS * self.warpgroups
    }

    /// Threads of a cube: a warpgroup more than multiply fetches.
    pub const fn units(&self) -> usize {
        WARPGROUP * (self.warpgroups + 1)
    }

    /// Subtiles of a row of queries or keys.
    pub const fn key_subtiles(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// Subtiles of a row of values.
    pub const fn value_subtiles(&self) -> usize {
        self.value_dim.div_ceil(SUBTILE)
    }

    /// Bytes of a block of keys.
    pub const fn key_bytes(&self) -> usize {
        self.keys * self.key_subtiles() * ROW_BYTES
    }

    /// Bytes of a block of values.
    pub const fn value_bytes(&self) -> usize {
        self.keys * self.value_subtiles() * ROW_BYTES
    }

    /// Where the blocks of keys start.
    pub const fn keys_at(&self) -> usize {
        self.rows() * self.key_subtiles() * ROW_BYTES
    }

    /// Where the blocks of values start.
    pub const fn values_at(&self) -> usize {
        self.keys_at() + self.stages * self.key_bytes()
    }

    /// Bytes of a block of biases: whole subtiles of its keys.
    pub const fn bias_bytes(&self) -> usize {
        self.rows() * self.bias_subtiles() * ROW_BYTES
    }

    /// Subtiles of a row of a block's biases.
    pub const fn bias_subtiles(&self) -> usize {
        self.keys.div_ceil(SUBTILE)
    }

    /// Where the blocks of biases start.
    pub const fn biases_at(&self) -> usize {
        self.values_at() + self.stages * self.value_bytes()
    }

    /// Where all blocks end.
    const fn blocks_end(&self) -> usize {
        self.biases_at() + self.bias_stages * self.bias_bytes()
    }

    const fn output_bytes(&self) -> usize {
        self.rows() * self.value_subtiles() * ROW_BYTES
    }

    /// Whether there is room beside the operands for an output on its way to memory. Then the next tile's
    /// queries can come while the output leaves.
    pub const fn has_output_place(&self) -> bool {
        self.blocks_end() + self.output_bytes() + SMALL_BYTES <= SHARED_MEMORY
    }

    /// Where the output goes through.
    pub const fn output_at(&self) -> usize {
        if self.has_output_place() {
            self.blocks_end()
        } else {
            0
        }
    }

    /// Where the barriers start: full and empty of every stage of keys, of values, and of the queries, three of used
    /// keys, and full and empty of every stage of biases.
    pub const fn barriers_at(&self) -> usize {
        if self.has_output_place() {
            self.blocks_end() + self.output_bytes()
        } else {
            self.blocks_end()
        }
    }

    /// Where the words start in which a bit stands for a key that somebody sees.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (4 * self.stages + 5 + 2 * self.bias_stages)
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// Columns of the output in registers.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.next_multiple_of(8)
    }

    /// Sizes of the vectors of registers of S, of P and of O.
    pub const fn fragments(&self) -> [usize; 3] {
        [
            registers(self.keys / 2),
            registers(self.keys / 4),
            registers(self.value_columns() / 2),
        ]
    }

    /// The product that makes S.
    pub const fn score_product(&self) -> ScoreProduct {
        ScoreProduct {
            depth: self.head_dim,
            left_rows: self.rows(),
            right_rows: self.keys,
            half: self.half,
        }
    }

    /// The product that adds to O.
    pub const fn output_product(&self) -> Product {
        Product {
            depth: self.keys,
            columns: self.value_columns(),
            half: self.half,
        }
    }

    /// Whether the output leaves through shared memory: its own place there or the queries'.
    pub const fn stores_output_by_tma(&self) -> bool {
        self.value_dim.is_multiple_of(16)
            && (self.has_output_place() || self.value_subtiles() <= self.key_subtiles())
    }

    /// What a warpgroup has of the output.
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

    /// Registers a thread of the warpgroup that fetches, and of those that multiply.
    pub const fn thread_registers(&self) -> [usize; 2] {
        match self.warpgroups {
            1 => [56, 256 - 16],
            2 => [24, 240],
            _ => [32, 160],
        }
    }
}
