//! The split-M tiles of a backward kernel, and their layout in shared memory. Each warpgroup computes 64 rows of the
//! gradients.
//!
//! Identifiers with *dot* are about rows of Q or K, and identifiers with *value* about rows of V or dO.

use crate::engine::tensor_core::wgmma::plan::tiles::{OutputShape, USED_WORDS};
use crate::math::side::{Side, Sums};
use cube_kit::hopper::{PRODUCT_ROWS, Product, ScoreProduct, WARPGROUP};
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE, registers};

/// The number of registers per thread in the producer warpgroup and in the spare warpgroups. These warpgroups give all
/// their other registers to the consumer warpgroups.
const FETCHING_REGISTERS: usize = 24;

/// Split-M tiles: each warpgroup has 64 rows of the tile, and computes all columns of the gradients of these rows
/// (`backward/split_m.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WgmmaGradientSplitMTiles {
    /// Tells whether the rows of the stationary tile are queries or keys.
    pub side: Side,
    /// The gradients that the kernel computes.
    pub sums: Sums,
    /// The number of columns of Q and K.
    pub head_dim: usize,
    /// The number of columns of V and dO.
    pub value_dim: usize,
    /// The half-precision type of the operands.
    pub half: Half,
    /// The number of f32 per query that the kernel loads. If the number is 2, they are the LSE and delta. If the number
    /// is 3, they are the row maximum, delta, and the logarithm of row_sum.
    pub lse_delta: usize,
    /// The number of consumer warpgroups.
    pub warpgroups: usize,
    /// The number of rows in a streamed block. Each row of the block gives a column of S.
    pub columns: usize,
    /// The number of shared-memory buffers (stages) for streamed blocks of Q or K (`q_or_k`).
    pub dot_stages: usize,
    /// The number of shared-memory buffers (stages) for streamed blocks of V or dO (`v_or_do`).
    pub value_stages: usize,
    /// The number of spare warpgroups. A spare warpgroup does no work. It only gives its registers to the consumer
    /// warpgroups.
    ///
    /// ptxas ignores `setmaxnreg` (warning C7508) if a thread has enough registers at entry. Spare warpgroups lower the
    /// number of registers per thread at entry, so that ptxas applies `setmaxnreg`.
    pub spare: usize,
    /// True if TMA copies the biases of each block to shared memory, together with the block's rows of Q or K.
    pub bias_boxes: bool,
}

impl WgmmaGradientSplitMTiles {
    /// The number of rows in a stationary tile.
    pub const fn rows(&self) -> usize {
        PRODUCT_ROWS * self.warpgroups
    }

    /// The number of threads in a CTA. A CTA has the consumer warpgroups, one producer warpgroup and the spare
    /// warpgroups.
    pub const fn units(&self) -> usize {
        WARPGROUP * (self.warpgroups + 1 + self.spare)
    }

    /// The number of subtiles (64 columns each) that hold a row of Q or K.
    pub const fn dot_subtiles(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// The number of subtiles (64 columns each) that hold a row of V or dO.
    pub const fn value_subtiles(&self) -> usize {
        self.value_dim.div_ceil(SUBTILE)
    }

    /// The bytes of the stationary tile's rows of Q or K.
    pub const fn stationary_dot_bytes(&self) -> usize {
        self.rows() * self.dot_subtiles() * ROW_BYTES
    }

    /// The bytes of the stationary tile's rows of V or dO; 0 if the kernel does not compute dP.
    pub const fn stationary_value_bytes(&self) -> usize {
        if self.sums.has_q_or_k() {
            self.rows() * self.value_subtiles() * ROW_BYTES
        } else {
            0
        }
    }

    /// The bytes of a streamed block of Q or K.
    pub const fn dot_bytes(&self) -> usize {
        self.columns * self.dot_subtiles() * ROW_BYTES
    }

    /// The bytes of a streamed block of V or dO.
    pub const fn value_bytes(&self) -> usize {
        self.columns * self.value_subtiles() * ROW_BYTES
    }

    /// The bytes of the LSE and delta (f32) of a block of queries, or 0 if the streamed blocks are keys.
    pub const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 4 * self.lse_delta * self.columns,
        }
    }

    /// The distance in bytes in shared memory from the LSE and delta of one block to the LSE and delta of the next
    /// block. TMA requires that the distance is a multiple of 128 bytes.
    pub const fn term_stride(&self) -> usize {
        self.term_bytes().next_multiple_of(128)
    }

    /// The byte offset in shared memory of the streamed blocks of Q or K.
    pub const fn q_or_k_at(&self) -> usize {
        self.stationary_dot_bytes() + self.stationary_value_bytes()
    }

    /// The byte offset in shared memory of the streamed blocks of V or dO.
    pub const fn values_at(&self) -> usize {
        self.q_or_k_at() + self.dot_stages * self.dot_bytes()
    }

    /// The number of TMA boxes that hold a block's biases. A box has one row per query, and 64 columns, one per key.
    pub const fn bias_subtiles(&self) -> usize {
        match self.side {
            Side::Queries => self.columns.div_ceil(SUBTILE),
            Side::Keys => self.rows().div_ceil(SUBTILE),
        }
    }

    /// The number of queries in a TMA box of biases.
    pub const fn bias_rows(&self) -> usize {
        match self.side {
            Side::Queries => self.rows(),
            Side::Keys => self.columns,
        }
    }

    /// The bytes of a block's biases; 0 if TMA does not copy biases.
    pub const fn bias_bytes(&self) -> usize {
        match self.bias_boxes {
            true => self.bias_subtiles() * self.bias_rows() * ROW_BYTES,
            false => 0,
        }
    }

    /// The byte offset in shared memory of the biases.
    pub const fn biases_at(&self) -> usize {
        self.values_at() + self.value_stages * self.value_bytes()
    }

    /// The byte offset in shared memory of LSE and delta.
    pub const fn lse_delta_at(&self) -> usize {
        self.biases_at() + self.dot_stages * self.bias_bytes()
    }

    /// The byte offset in shared memory of the barriers. Each stage has a full and an empty barrier. The stationary
    /// tile has one barrier.
    pub const fn barriers_at(&self) -> usize {
        self.lse_delta_at() + self.dot_stages * self.term_stride()
    }

    /// The byte offset in shared memory of the *used words*. Each bit of these words tells whether some row of the tile
    /// sees a certain row of a block.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (2 * self.dot_stages + 2 * self.value_stages + 1)
    }

    /// The bytes of shared memory that a CTA uses.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// The number of columns of dQ or dK that the registers of a warpgroup hold.
    pub const fn dot_columns(&self) -> usize {
        self.head_dim.next_multiple_of(8)
    }

    /// The number of columns of dV that the registers of a warpgroup hold.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.next_multiple_of(8)
    }

    /// The lengths of four register vectors. The first holds S (or dP), the second P (or dS), the third dQ or dK, and
    /// the fourth dV.
    pub const fn fragments(&self) -> [usize; 4] {
        [
            registers(self.columns / 2),
            registers(self.columns / 4),
            registers(self.dot_columns() / 2),
            registers(self.value_columns() / 2),
        ]
    }

    /// The shape of the GEMM that computes S or dP. `depth` is the number of columns of the GEMM's operands: Q and K
    /// for S, dO and V for dP.
    pub const fn score_product(&self, depth: usize) -> ScoreProduct {
        ScoreProduct {
            depth,
            left_rows: self.rows(),
            right_rows: self.columns,
            half: self.half,
        }
    }

    /// The shape of the gradient GEMM, which multiplies P or dS by a streamed block and adds the product to a gradient.
    /// The gradient has `columns` columns.
    pub const fn sum_product(&self, columns: usize) -> Product {
        Product {
            depth: self.columns,
            columns,
            half: self.half,
        }
    }

    /// True if TMA can store dQ or dK. The staging buffer is the shared memory that held the stationary rows of Q or K.
    pub const fn stores_q_or_k_by_tma(&self) -> bool {
        self.head_dim.is_multiple_of(16)
    }

    /// True if TMA can store dV. The staging buffer is the shared memory that held the stationary rows of V. If the
    /// tile holds no rows of V, the staging buffer is the shared memory that held the rows of K.
    pub const fn stores_values_by_tma(&self) -> bool {
        self.value_dim.is_multiple_of(16)
            && (self.sums.has_q_or_k() || self.value_subtiles() <= self.dot_subtiles())
    }

    /// The rows and columns of dQ or dK that a warpgroup computes, and the way in which the warpgroup stores them.
    pub const fn dot_shape(&self) -> OutputShape {
        OutputShape {
            columns: self.dot_columns(),
            width: self.head_dim,
            stored_by_tma: self.stores_q_or_k_by_tma(),
            subtile_bytes: self.rows() * ROW_BYTES,
            own_place: true,
            half: self.half,
        }
    }

    /// The rows and columns of dV that a warpgroup computes, and the way in which the warpgroup stores them.
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

    /// Two numbers of registers per thread: the number in the producer and spare warpgroups, and the number in the
    /// consumer warpgroups.
    pub const fn thread_registers(&self) -> [usize; 2] {
        // The CTA owns at most 65,536 registers. When the kernel starts, every thread owns the same number of
        // registers, a multiple of eight.
        let all = 65_536 / self.units() / 8 * 8 * self.units();
        let idle = WARPGROUP * FETCHING_REGISTERS * (1 + self.spare);
        let each = (all - idle) / (WARPGROUP * self.warpgroups) / 8 * 8;
        [FETCHING_REGISTERS, if each < 240 { each } else { 240 }]
    }
}
