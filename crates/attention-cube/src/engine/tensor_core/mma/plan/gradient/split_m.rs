//! The tiles and the shared memory of the split-M backward.

use crate::engine::tensor_core::mma::plan::warp::STEP;
use crate::math::side::{Side, Sums};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE, registers};

/// The tiles of the kernel in `backward/split_m.rs`. Each warp has some rows of the tile, and computes all columns of
/// the gradients of these rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaGradientSplitMTiles {
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
    /// The number of warps per CTA.
    pub warps: usize,
    /// The number of 16-row fragments of the tile per warp: 1 or 2. With two fragments, the warp loads each row of a
    /// streamed block once and multiplies both fragments by the row.
    pub fragments: usize,
    /// The number of rows per streamed block: 16, 32 or 64. Each row of the block gives a column of the scores.
    pub columns: usize,
}

impl MmaGradientSplitMTiles {
    /// The number of blocks in shared memory. The warps multiply one block while the copies of the next block are in
    /// flight (double buffering).
    const STAGES: usize = 2;

    /// The number of rows per tile.
    pub const fn rows(&self) -> usize {
        self.warps * self.warp_rows()
    }

    /// The number of rows per warp.
    pub const fn warp_rows(&self) -> usize {
        FRAGMENT_ROWS * self.fragments
    }

    /// The number of threads per CTA.
    pub const fn units(&self) -> usize {
        32 * self.warps
    }

    /// The bytes of `rows` rows of Q or K.
    const fn dot_bytes(&self, rows: usize) -> usize {
        rows * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// The bytes of `rows` rows of V or dO.
    const fn value_bytes(&self, rows: usize) -> usize {
        rows * self.value_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// The bytes of the LSE and delta (f32) of a block of queries, or 0 if the streamed blocks are keys.
    const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 4 * self.lse_delta * self.columns,
        }
    }

    /// The byte offset of the tile's rows of V or dO in shared memory, behind the tile's rows of Q or K.
    pub const fn stationary_values_at(&self) -> usize {
        self.dot_bytes(self.rows())
    }

    /// The byte offset of the first block in shared memory. The block lies behind the tile's rows of V or dO. If the
    /// kernel does not need these rows, the block lies behind the tile's rows of Q or K.
    pub const fn blocks_at(&self) -> usize {
        let v_or_do = match self.sums.has_q_or_k() {
            true => self.value_bytes(self.rows()),
            false => 0,
        };
        self.stationary_values_at() + v_or_do
    }

    /// The byte offset of the rows of V or dO in a block's buffer. They lie behind the rows of Q or K.
    pub const fn block_values_at(&self) -> usize {
        self.dot_bytes(self.columns)
    }

    /// The byte offset of LSE and delta in a block's buffer.
    pub const fn block_lse_delta_at(&self) -> usize {
        self.block_values_at() + self.value_bytes(self.columns)
    }

    /// The bytes from the start of one block's buffer to the start of the next. The number is rounded up to a multiple
    /// of the bytes of a subtile row.
    pub const fn block_bytes(&self) -> usize {
        (self.block_lse_delta_at() + self.term_bytes()).next_multiple_of(ROW_BYTES)
    }

    /// The bytes of shared memory per CTA.
    pub const fn shared_memory(&self) -> usize {
        self.blocks_at() + Self::STAGES * self.block_bytes()
    }

    /// The number of columns of dQ or dK that registers hold.
    pub const fn dot_columns(&self) -> usize {
        self.head_dim.next_multiple_of(STEP)
    }

    /// The number of columns of dV that registers hold.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.next_multiple_of(STEP)
    }

    /// The lengths of eight register vectors. The first four hold S (or dP), P (or dS), dQ or dK, and dV of one
    /// fragment. The last four hold the same values of all fragments of a warp.
    pub const fn vectors(&self) -> [usize; 8] {
        let (s, p) = (registers(self.columns / 2), registers(self.columns / 4));
        let q_or_k = registers(self.dot_columns() / 2);
        let v_or_do = registers(self.value_columns() / 2);
        let all = self.fragments;
        [
            s,
            p,
            q_or_k,
            v_or_do,
            all * s,
            all * p,
            all * q_or_k,
            all * v_or_do,
        ]
    }
}
