//! Selects the GEMVs that run on tensor cores, and divides them among warps.
//!
//! A fragment is 8 weight rows. A step is the columns that a warp multiplies at once. A block is the consecutive steps
//! whose weights a warp keeps in flight.

use super::super::launch_options::Shape;
use super::super::sums::ProjectPlan;
use super::super::{BATCH_MAX_ROWS, GEMV_MAX_ROWS};
use super::batch::TILE_ROWS;
use crate::op::sums::Team;
use cube_kit::ampere::gemv::{PIECE_COLUMNS, PRODUCT_ROWS};

/// The number of threads in a warp.
pub(super) const WARP: usize = 32;
/// The largest number of warps in a CTA.
const MOST_WARPS: usize = 16;
/// The target number of warps in a CTA, for most tunings.
const WARPS: usize = 8;

/// The step size of a tensor-core GEMV, and the parameters that were tuned by measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tuning {
    /// The smallest number of input rows for which the launcher uses the kernel.
    pub first_rows: usize,
    /// The largest number of input rows for which the launcher uses the kernel.
    pub last_rows: usize,
    /// The largest number of fragments per warp. A fragment is 8 weight rows.
    pub fragments: usize,
    /// The largest number of weight vectors that a thread keeps in flight.
    pub vectors: usize,
    /// The target number of threads per multiprocessor. To reach the target, the plan divides the inner dimension among
    /// more warps.
    pub threads: usize,
    /// The target number of warps in a CTA. A team of warps computes outputs together. If a team has fewer warps than
    /// this target, a CTA holds several teams.
    pub warps: usize,
    /// True if the kernel may read weights before it waits for the previous launch. The kernel does so only for weights
    /// that no launch writes.
    pub reads_ahead: bool,
}

/// Tuning for float weights. A thread keeps 16 vectors in flight, and the target is 1,024 threads per multiprocessor.
///
/// Decode speeds of E2B in bf16 on an H200, in tokens/s (for newer numbers see `docs/decode.md`):
/// - One sequence with 128 tokens of context: 504 with this tuning, 483 with a target of 512 threads, 490 with 8
///   vectors, and 489 on CUDA cores.
/// - 8 sequences with 8,192 tokens of context: 2,947 with this tuning, 3,080 with a target of 512 threads, and 1,460 on
///   CUDA cores.
pub(super) const WHOLE: Tuning = Tuning {
    first_rows: 1,
    last_rows: GEMV_MAX_ROWS,
    fragments: 2,
    vectors: 16,
    threads: 1024,
    warps: WARPS,
    reads_ahead: true,
};

/// Tunings for batches: float weights, and 9 to [`BATCH_MAX_ROWS`] input rows. The launcher uses the first tuning whose
/// range contains the number of input rows.
///
/// The table lists decode speeds in tokens/s for 16, 32 and 64 sequences, measured on 2026-11-28 for E2B in bf16 on an
/// H200 with 1,024 tokens of context. An empty cell has no measurement. The first three columns are fragments per warp,
/// weight vectors in flight per thread, and the target number of threads per multiprocessor.
///
/// | fragments | vectors | threads | 16 | 32 | 64 |
/// |---|---|---|---|---|---|
/// | 2 | 16 | 1,024 | 5,847 | 8,518 | 9,950 |
/// | 4 | 16 | 1,024 | 5,701 | 8,093 | |
/// | 4 | 16 | 512 | 5,805 | 7,902 | 10,259 |
/// | 4 | 8 | 1,024 | 5,195 | 8,025 | 10,576 |
/// | 4 | 8 | 512 | 5,151 | 8,989 | 10,359 |
pub(super) const WHOLE_BATCHES: [Tuning; 2] = [
    Tuning {
        first_rows: GEMV_MAX_ROWS + 1,
        last_rows: 16,
        fragments: 2,
        vectors: 16,
        threads: 1024,
        warps: WARPS,
        reads_ahead: true,
    },
    Tuning {
        first_rows: 17,
        last_rows: BATCH_MAX_ROWS,
        fragments: 4,
        vectors: 8,
        threads: 512,
        warps: WARPS,
        reads_ahead: true,
    },
];

/// The largest number of CTAs per multiprocessor for which a GEMV is fused with the preceding residual addition. Every
/// CTA recomputes the row of the residual stream, so large GEMVs are not fused.
///
/// Decode speeds of E2B in bf16 on an H200 with 128 tokens of context, in tokens/s: 522.8 without fusion, 525.3 with a
/// limit of 1, 523.3 with a limit of 2, and 522.7 without a limit. With 8,192 tokens of context, a limit of 1 is also
/// the fastest.
pub(super) const AFTER_RESIDUAL: usize = 1;

impl ProjectPlan {
    /// The number of fragments per warp. A fragment is 8 weight rows.
    pub(super) fn fragments(self) -> usize {
        self.weights() / PRODUCT_ROWS
    }

    /// The number of row tiles that the batch kernels process. A row tile is 16 input rows.
    pub(super) fn row_tiles(self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Returns this plan, limited to the input rows of one row tile. A row tile is 16 input rows.
    pub(super) fn of_row_tile(self, tile: usize) -> Self {
        let rows = (self.rows - tile * TILE_ROWS).min(TILE_ROWS);
        Self { rows, ..self }
    }

    /// The number of a warp's fragments that belong to the same matrix. A fragment is 8 weight rows. In a gated GEMV,
    /// half of a warp's fragments belong to the gate projection, and half belong to the up projection.
    pub(super) fn fragments_of_matrix(self) -> usize {
        self.outputs / PRODUCT_ROWS
    }
}

/// Returns the division of the GEMV among warps, or `None` if the tuning does not support the shape.
pub(super) fn plan(
    shape: Shape,
    tuning: Tuning,
    multiprocessors: usize,
    pdl: bool,
) -> Option<ProjectPlan> {
    let rows = tuning.first_rows..=tuning.last_rows;
    if !rows.contains(&shape.rows)
        || shape.outputs == 0
        || shape.columns == 0
        || !shape.columns.is_multiple_of(PIECE_COLUMNS)
    {
        return None;
    }
    // Give each warp several fragments, so that one read of the input serves several fragments. Use fewer fragments if
    // otherwise more than half of the multiprocessors would be idle.
    let matrices = if shape.gated { 2 } else { 1 };
    let teams_of = |outputs: usize| shape.outputs.div_ceil(outputs);
    let is_busy = |outputs: usize| 2 * teams_of(outputs) >= multiprocessors;
    let mut outputs = tuning.fragments / matrices * PRODUCT_ROWS;
    while outputs > PRODUCT_ROWS && !is_busy(outputs) {
        outputs /= 2;
    }
    let fragments = outputs / PRODUCT_ROWS * matrices;
    let steps = shape.columns / PIECE_COLUMNS;
    let unroll = largest_divisor(steps, tuning.vectors / fragments);
    let blocks = steps / unroll;
    let threads_of_one = teams_of(outputs) * WARP;
    let is_enough = |warps: &usize| warps * threads_of_one >= multiprocessors * tuning.threads;
    let warps = (1..=MOST_WARPS)
        .filter(|warps| blocks.is_multiple_of(*warps))
        .find(is_enough)
        .unwrap_or_else(|| largest_divisor(blocks, MOST_WARPS));
    let teams = (tuning.warps / warps).max(1);
    Some(ProjectPlan {
        rows: shape.rows,
        outputs,
        gated: shape.gated,
        team: Team {
            units: warps * WARP,
            width: WARP,
        },
        teams,
        ranks: 0,
        sides: shape.sides,
        unroll,
        is_padded: false,
        pdl,
        reads_ahead: false,
    })
}

/// Returns the largest divisor of `number` that is at most `most`.
fn largest_divisor(number: usize, most: usize) -> usize {
    (1..=most)
        .rev()
        .find(|divisor| number.is_multiple_of(*divisor))
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(outputs: usize, columns: usize, gated: bool) -> Shape {
        Shape {
            rows: 8,
            outputs,
            columns,
            gated,
            sides: 1,
        }
    }

    fn of(shape: Shape) -> Option<ProjectPlan> {
        plan(shape, WHOLE, 132, true)
    }

    /// Checks that all warps get the same number of whole blocks of columns, and that a CTA has at most 512 threads.
    #[test]
    fn plan_divides_blocks_equally_among_warps() {
        for columns in (32..=24_576).step_by(32) {
            for (outputs, gated) in [(1, false), (256, false), (6144, true), (262_144, false)] {
                let plan = of(shape(outputs, columns, gated)).expect("the columns are whole steps");
                let of_warps = 32 * plan.unroll * plan.team.parts();
                assert!(columns.is_multiple_of(of_warps), "{columns}: {plan:?}");
                assert!(plan.teams * plan.team.units <= 512, "{plan:?}");
                assert!(plan.fragments() * plan.unroll <= 16);
                assert!(plan.partials() * size_of::<f32>() <= 8192, "{plan:?}");
            }
        }
    }

    #[test]
    fn plan_with_few_outputs_uses_many_warps() {
        // The shapes are the GEMVs of a small model: the down projection, the gate of per-layer embeddings, the gate
        // and up projections, and the LM head.
        for (shape, outputs, warps) in [
            (shape(1536, 12_288, false), 16, 16),
            (shape(256, 1536, false), 8, 3),
            (shape(6144, 1536, true), 8, 6),
            (shape(262_144, 1536, false), 16, 1),
        ] {
            let plan = of(shape).expect("the columns are whole steps");
            assert_eq!((plan.outputs, plan.team.parts()), (outputs, warps));
        }
    }

    #[test]
    fn plan_of_unsupported_shapes_gives_none() {
        assert!(of(shape(64, 48, false)).is_none());
    }
}
