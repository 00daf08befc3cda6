//! The split-D tiles of a backward kernel, and their layout in shared memory. Each warpgroup computes all 64 rows and half
//! of the columns of one gradient.
//!
//! A *chunk* is some rows or columns of a block, as many as fill one stage of the ring.

use crate::engine::tensor_core::wgmma::plan::tiles::{
    ChunkedProduct, ChunkedScores, OutputShape, RingShape, USED_WORDS, WgmmaSplitDTiles,
};
use crate::math::side::{Side, Sums};
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE, is_whole};

/// Split-D tiles: each warpgroup computes all 64 rows and half of the columns of the gradient (`backward/split_d.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WgmmaGradientSplitDTiles {
    /// Tells whether the rows of the stationary tile are queries or keys.
    pub side: Side,
    /// The gradient that the kernel computes: either the gradient of Q or K, or the gradient of V.
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
    /// The number of stages (shared-memory buffers) in the ring. Each stage holds one chunk of an operand.
    pub stages: usize,
}

impl WgmmaGradientSplitDTiles {
    /// The number of rows in a stationary tile.
    pub const ROWS: usize = WgmmaSplitDTiles::ROWS;
    /// The number of rows in a streamed block.
    pub const COLUMNS: usize = WgmmaSplitDTiles::KEYS;
    /// The number of blocks whose LSE and delta are in shared memory at the same time.
    const TERM_STAGES: usize = 2;

    /// The number of chunks into which a block of Q or K is divided. Each of these chunks is a subtile of 64 columns.
    pub const fn dot_chunks(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// The number of chunks into which a block of V or dO is divided. Each of these chunks is a subtile of 64 columns.
    pub const fn value_chunks(&self) -> usize {
        self.value_dim.div_ceil(SUBTILE)
    }

    /// The number of columns of the gradient.
    pub const fn width(&self) -> usize {
        if self.sums.has_q_or_k() {
            self.head_dim
        } else {
            self.value_dim
        }
    }

    /// The number of gradient columns that a warpgroup computes.
    pub const fn own_columns(&self) -> usize {
        self.width().div_ceil(2).next_multiple_of(8)
    }

    /// The number of subtiles (64 columns each) in a warpgroup's part of the gradient.
    pub const fn own_subtiles(&self) -> usize {
        self.own_columns().div_ceil(SUBTILE)
    }

    /// The number of chunks of the gradient GEMM's right operand per block. One warpgroup uses the even chunks, and the
    /// other the odd chunks.
    pub const fn sum_chunks(&self) -> usize {
        WgmmaSplitDTiles::WARPGROUPS * WgmmaSplitDTiles::KEYS / WgmmaSplitDTiles::VALUE_KEYS
    }

    /// The bytes of one chunk of the gradient GEMM's right operand.
    pub const fn sum_bytes(&self) -> usize {
        WgmmaSplitDTiles::VALUE_KEYS * ROW_BYTES * self.own_subtiles()
    }

    /// The number of chunks per streamed block, counted over all operands. A chunk fills one stage (buffer) of the ring
    /// in shared memory.
    pub const fn block_chunks(&self) -> usize {
        let scores = if self.sums.has_q_or_k() {
            self.dot_chunks() + self.value_chunks()
        } else {
            self.dot_chunks()
        };
        scores + self.sum_chunks()
    }

    /// The bytes of the stationary tile's rows of Q or K.
    pub const fn stationary_dot_bytes(&self) -> usize {
        Self::ROWS * self.dot_chunks() * ROW_BYTES
    }

    /// The bytes of the stationary tile's rows of V or dO; 0 if the kernel does not compute dP.
    pub const fn stationary_value_bytes(&self) -> usize {
        if self.sums.has_q_or_k() {
            Self::ROWS * self.value_chunks() * ROW_BYTES
        } else {
            0
        }
    }

    /// The bytes of the LSE and delta (f32) of a block of queries, or 0 if the streamed blocks are keys.
    pub const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 4 * self.lse_delta * Self::COLUMNS,
        }
    }

    /// The byte offset in shared memory of the ring. The ring's buffers hold chunks of the streamed operands.
    pub const fn stages_at(&self) -> usize {
        self.stationary_dot_bytes() + self.stationary_value_bytes()
    }

    /// The byte offset in shared memory of P or dS.
    pub const fn factors_at(&self) -> usize {
        self.stages_at() + self.stages * WgmmaSplitDTiles::STAGE_BYTES
    }

    /// The byte offset in shared memory of LSE and delta.
    pub const fn lse_delta_at(&self) -> usize {
        self.factors_at() + 2 * WgmmaSplitDTiles::HALF_BYTES
    }

    /// The byte offset in shared memory of the barriers. Each stage has a full and an empty barrier. The stationary
    /// tile has one barrier.
    pub const fn barriers_at(&self) -> usize {
        self.lse_delta_at() + Self::TERM_STAGES * self.term_bytes()
    }

    /// The byte offset in shared memory of the *used words*. Each bit of these words tells whether some row of the tile
    /// sees a certain row of a block.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (2 * self.stages + 1)
    }

    /// The bytes of shared memory that a CTA uses.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// The ring of shared-memory buffers through which all chunks pass.
    pub const fn ring(&self) -> RingShape {
        RingShape {
            stages: self.stages,
            whole_rounds: self.dot_chunks().is_multiple_of(self.stages)
                && self.value_chunks().is_multiple_of(self.stages)
                && self.sum_chunks().is_multiple_of(self.stages),
        }
    }

    /// The shape of the GEMM that computes S or dP from operands of `depth` columns. If `frees_before`, the GEMM also
    /// frees the shared-memory buffer that holds the last chunk of the preceding GEMM.
    pub const fn score_product(&self, depth: usize, frees_before: bool) -> ChunkedScores {
        ChunkedScores {
            depth,
            register_chunks: 0,
            query_fragment: 0,
            frees_before,
            ring: self.ring(),
            half: self.half,
        }
    }

    /// The shape of the GEMM that multiplies P or dS by a streamed block and adds the product to the gradient.
    pub const fn sum_product(&self) -> ChunkedProduct {
        ChunkedProduct {
            columns: self.own_columns(),
            ring: self.ring(),
            half: self.half,
        }
    }

    /// The lengths of three register vectors. The first holds S (or dP), the second P (or dS), and the third the
    /// gradient.
    pub const fn fragments(&self) -> [usize; 3] {
        [
            Self::COLUMNS / 4,
            Self::COLUMNS / 8,
            self.sum_product().fragment(),
        ]
    }

    /// True if TMA can copy a chunk of the gradient GEMM's right operand as one box, instead of one box per subtile.
    pub const fn has_whole_sums(&self) -> bool {
        is_whole(self.width()) && is_whole(self.own_columns())
    }

    /// True if TMA can store the gradient from the shared memory that held the stationary rows of Q or K. The gradient
    /// must fit there. No subtile (64 columns) may have columns of both warpgroups.
    pub const fn stores_gradient_by_tma(&self) -> bool {
        self.own_columns().is_multiple_of(SUBTILE)
            && self.width().is_multiple_of(8)
            && WgmmaSplitDTiles::WARPGROUPS * self.own_subtiles() <= self.dot_chunks()
    }

    /// The rows and columns of the gradient that a warpgroup computes, and the way in which the warpgroup stores them.
    pub const fn output_shape(&self) -> OutputShape {
        OutputShape {
            columns: self.own_columns(),
            width: self.width(),
            stored_by_tma: self.stores_gradient_by_tma(),
            subtile_bytes: PRODUCT_ROWS * ROW_BYTES,
            own_place: true,
            half: self.half,
        }
    }
}
