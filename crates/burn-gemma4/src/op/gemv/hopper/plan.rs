//! The division of a batch GEMM among cubes.

use super::super::launch_options::Shape;
use cube_kit::hopper::gemm::{
    mainloop::{Mainloop, SUBTILE_BYTES},
    plan::RingLayout,
};
use cube_kit::hopper::{PRODUCT_ROWS, WARPGROUP};
use cube_kit::nvidia::matrix::Major;
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE};
use cubecl::prelude::CubeDim;

/// The number of threads per cube: a consumer warpgroup and a producer warp.
pub(super) const UNITS: usize = WARPGROUP + 32;

/// The smallest number of input rows per tile. The input rows are the columns of a `wgmma`, which has at least 8
/// columns.
const LEAST_TOKENS: usize = 8;

/// The number of neighboring outputs that a thread finishes at once. The number of rows of each matrix must be a
/// multiple of this number.
pub(super) const WIDTH: usize = 4;

/// The largest number of bytes of shared memory per cube with which two cubes fit on a multiprocessor. A multiprocessor
/// has 228 KB, and the system reserves 1 KB per cube.
const SHARED_MEMORY: usize = 113 * 1024;

/// The number of bytes of the barrier at which a cube waits for the partial sums of the cluster.
const SUMS_BARRIER_BYTES: usize = 16;

/// The limits of a plan. They were tuned for decode speed.
///
/// Decode speeds in tokens/s of 1, 8, 16 and 64 sequences, measured on 2026-11-29 for E2B in bf16 on an H200 with 1,024
/// tokens of context. An empty cell has no measurement. A part is the range of the inner dimension that one cube
/// multiplies. The first row has the limits in [`LIMITS`]. The second row differs from the first row only in the number
/// of chunks. Each further row differs from the second row only in the setting that it names.
///
/// | limits | 1 | 8 | 16 | 64 |
/// |---|---|---|---|---|
/// | at least 2 chunks per part, at most 8 parts and 2 cubes per multiprocessor | 541 | 4,046 | 7,421 | 21,809 |
/// | at least 4 chunks | 533 | 4,035 | 7,477 | 21,800 |
/// | at least 8 chunks | | | | 21,620 |
/// | at most 4 parts | 528 | 4,047 | 7,380 | 21,226 |
/// | at most 1.2 cubes per multiprocessor | | | | 21,224 |
/// | at most 3 cubes per multiprocessor | 526 | 3,875 | 7,219 | |
/// | at most 4 cubes per multiprocessor | 523 | 3,878 | 7,228 | 20,407 |
/// | 74 KB of shared memory, for three cubes on a multiprocessor | 519 | 3,909 | 7,270 | |
/// | 225 KB of shared memory, for one cube on a multiprocessor | | | | 20,559 |
/// | two row tiles from 1 cube per multiprocessor on | 536 | 3,992 | 7,447 | 21,731 |
/// | without this kernel, on `mma.sync` | 527 | 3,590 | 5,850 | 10,330 |
struct Limits {
    /// The largest number of cubes that divide the inner dimension of an output tile. The cubes form a cluster. A
    /// cluster of at most 8 cubes needs no special launch attribute (portable cluster size).
    parts: usize,
    /// The smallest number of chunks of the inner dimension that a cube multiplies.
    chunks: usize,
    /// The largest number of cubes per multiprocessor in a GEMM whose inner dimension is divided among cubes.
    cubes: usize,
    /// A cube multiplies by two row tiles if the GEMM then has at least this number of cubes per multiprocessor. In a
    /// smaller GEMM a cube multiplies by one row tile. A row tile has 64 weight rows.
    wide: usize,
    /// The largest number of stages in the ring buffer.
    stages: usize,
    /// The largest number of input rows per tile for which each partial sum is sent with a signal of its own
    /// (`st.async`). For more rows, the signals take longer than a barrier of the cluster with a fence. Decode speeds in
    /// tokens/s of 1, 8, 16 and 64 sequences (2026-11-30, otherwise as above): always with a barrier 539, 4,064, 7,469
    /// and 21,366; always with signals 553, 4,083, 7,541 and 20,178.
    signals: usize,
}

const LIMITS: Limits = Limits {
    parts: 8,
    chunks: 2,
    cubes: 2,
    wide: 2,
    stages: 12,
    signals: 16,
};

/// The compile-time settings of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct BatchPlan {
    /// The number of input rows per tile, a power of two. If the input has fewer rows, the other rows of the tile are
    /// zeros.
    pub tokens: usize,
    /// The number of row tiles of weights per cube. A row tile has 64 weight rows. A gated GEMM has one row tile of the
    /// gate projection and one of the up projection.
    pub row_tiles: usize,
    /// True for GeGLU.
    pub gated: bool,
    /// The number of concatenated matrices.
    pub sides: usize,
    /// The number of cubes that divide the inner dimension of an output tile. These cubes form a cluster.
    pub parts: usize,
    /// The number of stages in the ring buffer.
    pub stages: usize,
    /// The dtype of the input and of the weights, f16 or bf16.
    pub half: Half,
    /// True if the kernel uses programmatic dependent launch.
    pub pdl: bool,
    /// True if the kernel reads weights before it waits for the previous launch. No launch may write these weights.
    pub reads_ahead: bool,
}

impl BatchPlan {
    /// The number of inner elements per chunk. A stage of the ring buffer holds a chunk.
    pub const DEPTH: usize = SUBTILE;

    /// Divides a GEMM among the cubes of a device with `multiprocessors` multiprocessors.
    pub(super) fn new(shape: Shape, half: Half, multiprocessors: usize, pdl: bool) -> Self {
        let tokens = shape.rows.next_power_of_two().max(LEAST_TOKENS);
        let cubes = |outputs: usize| shape.outputs.div_ceil(outputs);
        let is_wide = cubes(2 * PRODUCT_ROWS) >= LIMITS.wide * multiprocessors;
        let row_tiles = if shape.gated || is_wide { 2 } else { 1 };
        let of_cube = match shape.gated {
            true => PRODUCT_ROWS,
            false => row_tiles * PRODUCT_ROWS,
        };
        let tiles = cubes(of_cube);
        let chunks = shape.columns.div_ceil(Self::DEPTH);
        let mut parts = 1;
        while 2 * parts <= LIMITS.parts
            && 2 * parts * LIMITS.chunks <= chunks
            && 2 * parts * tiles <= LIMITS.cubes * multiprocessors
        {
            parts *= 2;
        }
        let plan = Self {
            tokens,
            row_tiles,
            gated: shape.gated,
            sides: shape.sides,
            parts,
            stages: 1,
            half,
            pdl,
            reads_ahead: false,
        };
        let free = SHARED_MEMORY - plan.partials_bytes() - SUMS_BARRIER_BYTES;
        let stages = free / (plan.stage_bytes() + RingLayout::BARRIER_BYTES);
        Self {
            stages: stages.min(chunks.div_ceil(parts)).min(LIMITS.stages),
            ..plan
        }
    }

    /// The number of outputs that a cube computes for each input row.
    pub const fn outputs(&self) -> usize {
        PRODUCT_ROWS * self.row_tiles / if self.gated { 2 } else { 1 }
    }

    /// The size of a cluster. A cluster consists of all cubes that compute the same output tile.
    pub const fn cluster(&self) -> CubeDim {
        CubeDim::new_1d(self.parts as u32)
    }

    /// True if each partial sum is sent with a signal of its own.
    pub const fn has_signals(&self) -> bool {
        self.parts > 1 && self.tokens <= LIMITS.signals
    }

    /// The number of input rows per slice. A slice is the input rows for which one cube adds up the partial sums of all
    /// cubes in the cluster.
    pub const fn slice(&self) -> usize {
        self.tokens / self.parts
    }

    /// The distance between the partial sums of two consecutive input rows, in f32 numbers. The distance includes
    /// padding, which avoids bank conflicts.
    pub const fn partials_stride(&self) -> usize {
        PRODUCT_ROWS * self.row_tiles + 4
    }

    const fn partials_bytes(&self) -> usize {
        self.tokens * self.partials_stride() * size_of::<f32>()
    }

    /// The offset of the input rows within a stage, in bytes. The weights are stored before the input rows.
    pub const fn input_at(&self) -> usize {
        self.row_tiles * SUBTILE_BYTES
    }

    pub const fn stage_bytes(&self) -> usize {
        self.input_at() + self.tokens * ROW_BYTES
    }

    /// The offset of the partial sums in shared memory, in bytes, relative to the beginning of the first stage.
    pub const fn partials_at(&self) -> usize {
        self.stages * self.stage_bytes()
    }

    /// The offset of the barrier at which a cube waits for the partial sums of the cluster.
    pub const fn sums_barrier_at(&self) -> usize {
        self.partials_at() + self.partials_bytes()
    }

    pub const fn ring(&self) -> RingLayout {
        RingLayout {
            stages: self.stages,
            barriers_at: self.sums_barrier_at() + SUMS_BARRIER_BYTES,
            arrivals: WARPGROUP / 32,
        }
    }

    pub const fn mainloop(&self) -> Mainloop {
        Mainloop {
            row_tiles: self.row_tiles,
            columns: self.tokens,
            lhs: Major::Inner,
            rhs: Major::Inner,
            half: self.half,
            stages: self.stages,
            stage_bytes: self.stage_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rows: usize, outputs: usize, columns: usize, gated: bool) -> BatchPlan {
        let shape = Shape {
            rows,
            outputs,
            columns,
            gated,
            sides: 1,
        };
        BatchPlan::new(shape, Half::Bf16, 132, true)
    }

    /// Checks that two cubes fit on a multiprocessor, that every part of the inner dimension has chunks, and that the
    /// number of parts divides the number of input rows in a tile.
    #[test]
    fn plan_of_every_shape_fits_shared_memory() {
        for rows in 1..=64 {
            for columns in [8, 64, 72, 256, 1536, 2600, 12_288] {
                for (outputs, gated) in [(4, false), (1536, false), (6144, true), (262_144, false)]
                {
                    let plan = plan(rows, outputs, columns, gated);
                    let chunks = columns.div_ceil(BatchPlan::DEPTH);
                    assert!(plan.ring().shared_memory() <= SHARED_MEMORY, "{plan:?}");
                    assert!(plan.stages >= 1 && plan.parts <= chunks, "{plan:?}");
                    assert!(plan.tokens.is_multiple_of(plan.parts), "{plan:?}");
                    assert!(plan.tokens >= rows, "{plan:?}");
                }
            }
        }
    }

    #[test]
    fn plan_of_few_outputs_divides_the_inner_dimension() {
        // The shapes are those of E2B's GEMMs: the down projection, the gate of per-layer embeddings, the gate and up
        // projections, and the LM head.
        for (outputs, columns, gated, row_tiles, parts) in [
            (1536, 6144, false, 1, 8),
            (256, 1536, false, 1, 8),
            (6144, 1536, true, 2, 2),
            (262_144, 1536, false, 2, 1),
        ] {
            let plan = plan(64, outputs, columns, gated);
            assert_eq!((plan.row_tiles, plan.parts), (row_tiles, parts), "{plan:?}");
        }
    }
}
