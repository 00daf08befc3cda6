//! Which products of a few rows matrix units take, and how they are divided.

use super::{
    super::{MOST_ROWS, sums::ProjectPlan},
    words::{BLOCK, STEP},
};
use crate::op::sums::Team;
use cube_kit::ampere::few_rows::{PIECE_COLUMNS, PRODUCT_ROWS};

/// Threads of a warp.
pub(super) const WARP: usize = 32;
/// Warps of a cube at most.
const MOST_WARPS: usize = 16;
/// Warps of a cube whose teams are smaller.
const WARPS: usize = 8;

/// What is measured of a kernel, beside what it is written for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tuning {
    /// It takes products of so many rows and more, up to [`MOST_ROWS`].
    pub first_rows: usize,
    /// Columns of the inner dimension that it multiplies in a step.
    pub step: usize,
    pub at_once: AtOnce,
    /// Threads for each multiprocessor, of which a product has as many as its inner dimension can be divided among.
    pub threads: usize,
    /// Whether parameters are read before the launches before have ended.
    pub reads_ahead: bool,
}

/// What a warp has in flight.
#[derive(Clone, Copy, Debug)]
pub(super) enum AtOnce {
    /// As many steps as have so many vectors of weights at most.
    Vectors(usize),
    Steps(usize),
}

/// Of whole weights. Measured by E2B's decoding in bf16 on an H200, before products let the next launch begin later (`docs/token.md` has the same since), tokens/s. One sequence, 128 columns: 504; with 512 threads 483; with 8 vectors and
/// 1,024 threads 490, with 512 threads 429; with 16 vectors and 256 threads 418; by ordinary units 489. 8 sequences at 8,192: with 512 threads 3,080, with 8 vectors
/// 2,764, and with 1,024 threads 2,947; by ordinary units 1,460.
pub(super) const WHOLE: Tuning = Tuning {
    first_rows: 1,
    step: PIECE_COLUMNS,
    at_once: AtOnce::Vectors(16),
    threads: 1024,
    reads_ahead: true,
};

/// Of words. Of one row ordinary units are faster, as measured so: 616 tokens/s for 512 in Q4_0, 539 for 477 in Q8_0.
pub(super) const WORDS: Tuning = Tuning {
    first_rows: 2,
    step: STEP,
    at_once: AtOnce::Steps(BLOCK),
    threads: 1024,
    reads_ahead: true,
};

/// Cubes for each multiprocessor up to which a product makes its row itself, where it comes of the residual stream: the gate of a layer's embedding
/// and the queries of sliding layers that read others' keys have at most so many, projections of more heads up to 2, gate and up more, and each cube does it anew.
/// E2B's shapes in bf16 on an H200, tokens/s at 128 and 8,192 tokens of context: 522.8 and 516.3 with none; 525.3 and 518.9 with 1; 523.3 and 516.6 with 2; 522.7 and
/// 516.2 with all. Before launches overlapped, all products that did so were slower, 367 for 398.
pub(super) const AFTER_RESIDUAL: usize = 1;

/// A product as it is divided.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Rows of the input.
    pub rows: usize,
    /// Rows of the matrix, or of all that lie side by side.
    pub outputs: usize,
    pub columns: usize,
    pub gated: bool,
    /// Matrices that lie side by side.
    pub sides: usize,
}

impl ProjectPlan {
    /// Times 8 weight rows that a warp has.
    pub(super) fn fragments(self) -> usize {
        self.weights() / PRODUCT_ROWS
    }

    /// Of them, those of each of its matrices.
    pub(super) fn fragments_of_matrix(self) -> usize {
        self.outputs / PRODUCT_ROWS
    }
}

/// How the product is divided; nothing where it is left to ordinary units.
pub(super) fn plan(
    shape: Shape,
    tuning: Tuning,
    multiprocessors: usize,
    overlaps: bool,
) -> Option<ProjectPlan> {
    let rows = tuning.first_rows..=MOST_ROWS;
    if !rows.contains(&shape.rows)
        || shape.outputs == 0
        || shape.columns == 0
        || !shape.columns.is_multiple_of(tuning.step)
    {
        return None;
    }
    // Two fragments share what is read of the input; where that leaves half of the multiprocessors idle, one has it alone.
    let two = 2 * PRODUCT_ROWS;
    let outputs = match shape.gated || 2 * shape.outputs.div_ceil(two) < multiprocessors {
        true => PRODUCT_ROWS,
        false => two,
    };
    let fragments = outputs / PRODUCT_ROWS * if shape.gated { 2 } else { 1 };
    let steps = shape.columns / tuning.step;
    let unroll = match tuning.at_once {
        AtOnce::Vectors(vectors) => largest_divisor(steps, vectors / fragments),
        AtOnce::Steps(at_once) => steps.is_multiple_of(at_once).then_some(at_once)?,
    };
    let blocks = steps / unroll;
    let threads_of_one = shape.outputs.div_ceil(outputs) * WARP;
    let is_enough = |warps: &usize| warps * threads_of_one >= multiprocessors * tuning.threads;
    let warps = (1..=MOST_WARPS)
        .filter(|warps| blocks.is_multiple_of(*warps))
        .find(is_enough)
        .unwrap_or_else(|| largest_divisor(blocks, MOST_WARPS));
    let teams = (WARPS / warps).max(1);
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
        overlaps,
        reads_ahead: false,
    })
}

/// Of a number, up to `most`.
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

    /// Every warp has as many whole blocks as the others, and cubes are of at most 512 threads.
    #[test]
    fn warps_have_equal_parts() {
        for columns in (32..=24_576).step_by(32) {
            for (outputs, gated) in [(1, false), (256, false), (6144, true), (262_144, false)] {
                let plan = of(shape(outputs, columns, gated)).expect("whole steps");
                let of_warps = 32 * plan.unroll * plan.team.parts();
                assert!(columns.is_multiple_of(of_warps), "{columns}: {plan:?}");
                assert!(plan.teams * plan.team.units <= 512, "{plan:?}");
                assert!(plan.fragments() * plan.unroll <= 16);
                assert!(plan.partials() * size_of::<f32>() <= 8192, "{plan:?}");
            }
        }
    }

    #[test]
    fn few_outputs_have_many_warps() {
        // Down, the gate of a layer's embedding, gate and up, and the head of a small model.
        for (shape, outputs, warps) in [
            (shape(1536, 12_288, false), 16, 16),
            (shape(256, 1536, false), 8, 3),
            (shape(6144, 1536, true), 8, 6),
            (shape(262_144, 1536, false), 16, 1),
        ] {
            let plan = of(shape).expect("whole steps");
            assert_eq!((plan.outputs, plan.team.parts()), (outputs, warps));
        }
    }

    #[test]
    fn the_others_are_left() {
        assert!(of(shape(64, 48, false)).is_none());
        let words = |columns| plan(shape(64, columns, false), WORDS, 132, true);
        assert!(words(320).is_none());
        let of_one_row = Shape {
            rows: 1,
            ..shape(64, 1536, false)
        };
        assert!(plan(of_one_row, WORDS, 132, true).is_none());
        assert_eq!(words(1536).map(|plan| plan.team.parts()), Some(6));
    }
}
