//! Where things are in shared memory where a warpgroup has rows of a gradient.

use crate::engine::wgmma::plan::tiles::{OutputShape, USED_WORDS};
use crate::math::side::{Side, Sums};
use cube_kit::hopper::{
    Half, PRODUCT_ROWS, Product, ROW_BYTES, SUBTILE, ScoreProduct, WARPGROUP, registers,
};

/// Registers a thread of a warpgroup that does not multiply.
const FETCHING_REGISTERS: usize = 24;

/// Each warpgroup has 64 rows and all columns of their gradients: `backward/split_m.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientSplitMTiles {
    /// What the rows are.
    pub side: Side,
    /// What is summed.
    pub sums: Sums,
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Numbers that come with a query: its logsumexp and Δ, or its reference, Δ, and the logarithm of the sum by the reference.
    pub terms: usize,
    /// Warpgroups that multiply.
    pub warpgroups: usize,
    /// Rows of a block of the other side: the columns of the scores.
    pub columns: usize,
    /// Blocks of dots in shared memory.
    pub dot_stages: usize,
    /// Blocks of values in shared memory.
    pub value_stages: usize,
    /// Warpgroups that do nothing but give their registers. ptxas hands registers out anew (`setmaxnreg`) only in kernels that
    /// need more than a thread has at entry, else it keeps to these (C7508): with more threads that is fewer.
    pub spare: usize,
}

impl GradientSplitMTiles {
    /// Rows of a tile.
    pub const fn rows(&self) -> usize {
        PRODUCT_ROWS * self.warpgroups
    }

    /// Threads of a cube: a warpgroup more than multiply fetches.
    pub const fn units(&self) -> usize {
        WARPGROUP * (self.warpgroups + 1 + self.spare)
    }

    /// Subtiles of a row of queries or keys.
    pub const fn dot_subtiles(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// Subtiles of a row of values.
    pub const fn value_subtiles(&self) -> usize {
        self.value_dim.div_ceil(SUBTILE)
    }

    /// Bytes of the dots that are held.
    pub const fn stationary_dot_bytes(&self) -> usize {
        self.rows() * self.dot_subtiles() * ROW_BYTES
    }

    /// Bytes of the values that are held, where these are needed.
    pub const fn stationary_value_bytes(&self) -> usize {
        if self.sums.has_dots() {
            self.rows() * self.value_subtiles() * ROW_BYTES
        } else {
            0
        }
    }

    /// Bytes of a block of dots.
    pub const fn dot_bytes(&self) -> usize {
        self.columns * self.dot_subtiles() * ROW_BYTES
    }

    /// Bytes of a block of values.
    pub const fn value_bytes(&self) -> usize {
        self.columns * self.value_subtiles() * ROW_BYTES
    }

    /// Bytes of the queries' terms that come with a block of these, in f32.
    pub const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 4 * self.terms * self.columns,
        }
    }

    /// From a block's terms in shared memory to the next's: the copy engine writes at multiples of 128 bytes.
    pub const fn term_stride(&self) -> usize {
        self.term_bytes().next_multiple_of(128)
    }

    /// Where the blocks of dots start.
    pub const fn dots_at(&self) -> usize {
        self.stationary_dot_bytes() + self.stationary_value_bytes()
    }

    /// Where the blocks of values start.
    pub const fn values_at(&self) -> usize {
        self.dots_at() + self.dot_stages * self.dot_bytes()
    }

    /// Where the terms start.
    pub const fn terms_at(&self) -> usize {
        self.values_at() + self.value_stages * self.value_bytes()
    }

    /// Where the barriers start: full and empty of every stage of dots and of values, and one for what is held.
    pub const fn barriers_at(&self) -> usize {
        self.terms_at() + self.dot_stages * self.term_stride()
    }

    /// Where the words start in which a bit stands for a column that some row uses.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (2 * self.dot_stages + 2 * self.value_stages + 1)
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// Columns of the dots' gradient in registers.
    pub const fn dot_columns(&self) -> usize {
        self.head_dim.next_multiple_of(8)
    }

    /// Columns of the values' gradient in registers.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.next_multiple_of(8)
    }

    /// Sizes of the vectors of registers of S and dP, of P and dS, and of the gradients.
    pub const fn fragments(&self) -> [usize; 4] {
        [
            registers(self.columns / 2),
            registers(self.columns / 4),
            registers(self.dot_columns() / 2),
            registers(self.value_columns() / 2),
        ]
    }

    /// The product that makes S, where it is the dots', or dP.
    pub const fn score_product(&self, depth: usize) -> ScoreProduct {
        ScoreProduct {
            depth,
            left_rows: self.rows(),
            right_rows: self.columns,
            half: self.half,
        }
    }

    /// The product that adds to a gradient of so many columns.
    pub const fn sum_product(&self, columns: usize) -> Product {
        Product {
            depth: self.columns,
            columns,
            half: self.half,
        }
    }

    /// Whether the dots' gradient leaves through their place in shared memory.
    pub const fn stores_dots_by_tma(&self) -> bool {
        self.head_dim.is_multiple_of(16)
    }

    /// Whether the values' gradient leaves through shared memory: the values' place there, or the dots'.
    pub const fn stores_values_by_tma(&self) -> bool {
        self.value_dim.is_multiple_of(16)
            && (self.sums.has_dots() || self.value_subtiles() <= self.dot_subtiles())
    }

    /// What a warpgroup has of the dots' gradient.
    pub const fn dot_shape(&self) -> OutputShape {
        OutputShape {
            columns: self.dot_columns(),
            width: self.head_dim,
            stored_by_tma: self.stores_dots_by_tma(),
            subtile_bytes: self.rows() * ROW_BYTES,
            own_place: true,
            half: self.half,
        }
    }

    /// What a warpgroup has of the values' gradient.
    pub const fn value_shape(&self) -> OutputShape {
        OutputShape {
            columns: self.value_columns(),
            width: self.value_dim,
            stored_by_tma: self.stores_values_by_tma(),
            subtile_bytes: self.rows() * ROW_BYTES,
            own_place: true,
            half: self.half,
        }
    }

    /// Registers a thread of the warpgroup that fetches, and of those that multiply.
    pub const fn thread_registers(&self) -> [usize; 2] {
        // What the cube starts with is handed out anew: of 65,536, by eights a thread.
        let all = 65_536 / self.units() / 8 * 8 * self.units();
        let idle = WARPGROUP * FETCHING_REGISTERS * (1 + self.spare);
        let each = (all - idle) / (WARPGROUP * self.warpgroups) / 8 * 8;
        [FETCHING_REGISTERS, if each < 240 { each } else { 240 }]
    }
}
