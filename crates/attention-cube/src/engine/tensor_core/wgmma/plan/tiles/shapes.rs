//! The shapes of GEMMs with chunked operands, of the ring, and of the output.

use cube_kit::nvidia::{Half, registers};

/// The bytes of shared memory that a CTA may use on Hopper.
pub(in crate::engine::tensor_core::wgmma::plan) const SHARED_MEMORY: usize = 232_448;

/// The bytes of shared memory that the layouts reserve for barriers and other small data.
pub(super) const SMALL_BYTES: usize = 512;

/// The rows and columns of a tile's output or gradient that a warpgroup computes, and the way in which the warpgroup
/// stores them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OutputShape {
    /// The number of columns that the warpgroup computes.
    pub columns: usize,
    /// The number of columns of the output or gradient tensor.
    pub width: usize,
    /// True if TMA stores the result from a staging buffer in shared memory. Otherwise each thread stores its own rows.
    pub stored_by_tma: bool,
    /// The bytes from the start of one subtile (64 columns) to the start of the next in the staging buffer.
    pub subtile_bytes: usize,
    /// True if no operand is copied to the staging buffer after the store. If the field is false, an operand may be
    /// copied there. The warpgroup then waits for its TMA store before it continues.
    pub own_place: bool,
    /// The half-precision type of the stored elements.
    pub half: Half,
}

impl OutputShape {
    /// Returns the shape for a kernel that writes partial results if `split`, else final results. Partial results are
    /// f32. They would not fit in the staging buffer, so threads store them without TMA.
    pub const fn of_part(self, split: bool) -> Self {
        Self {
            stored_by_tma: self.stored_by_tma && !split,
            ..self
        }
    }
}

/// A ring of pipeline stages in shared memory, for chunks of operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingShape {
    /// The number of stages (shared-memory buffers) in the ring. Each stage holds one chunk of an operand.
    pub stages: usize,
    /// True if, for every operand of a block, the number of chunks is a multiple of `stages`. The first chunk of every
    /// operand then goes to the ring's first stage.
    pub whole_rounds: bool,
}

/// The GEMM `left · rightᵀ`, which computes 64 rows of S or dP. The right operand comes in chunks of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkedScores {
    /// The number of columns of both operands, which is the inner dimension of the GEMM.
    pub depth: usize,
    /// The number of chunks of the left operand that stay in registers.
    pub register_chunks: usize,
    /// The size of the register vector that holds the left operand's chunks.
    pub query_fragment: usize,
    /// True if this GEMM also frees the shared-memory buffer that holds the last chunk of the preceding GEMM.
    pub frees_before: bool,
    /// The ring of shared-memory buffers through which the right operand's chunks pass.
    pub ring: RingShape,
    /// The half-precision type of the operands.
    pub half: Half,
}

/// The GEMM `left · right`, which adds to O or to a gradient. The right operand comes in chunks of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkedProduct {
    /// The number of columns of the result.
    pub columns: usize,
    /// The ring of shared-memory buffers through which the right operand's chunks pass.
    pub ring: RingShape,
    /// The half-precision type of the operands.
    pub half: Half,
}

impl ChunkedProduct {
    /// The size of the register vector that holds the result.
    pub const fn fragment(&self) -> usize {
        registers(self.columns / 2)
    }
}

/// The number of 32-bit *used words*: 4 words for each of three blocks in flight. Each bit of these words tells whether
/// some row of the tile sees a certain row of a block.
pub(crate) const USED_WORDS: usize = 12;
