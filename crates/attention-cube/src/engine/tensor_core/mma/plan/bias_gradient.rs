//! The tiles of the bias gradient on tensor cores, and their layout in shared memory.

use super::requirements::check;
use super::warp::STEP;
use crate::auxiliary::mask_bits::plan::check_mask;
use crate::math::side::Side;
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::Refusal;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::nvidia::{Half, ROW_BYTES, SUBTILE, registers};

/// The sizes of the tiles of the bias gradient. Each warp has some of the tile's queries and all of the tile's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BiasGradientTiles {
    /// The number of columns of Q and K.
    pub head_dim: usize,
    /// The number of columns of V.
    pub value_dim: usize,
    /// The half precision type of the operands.
    pub half: Half,
    /// The number of warps per CTA.
    pub warps: usize,
    /// The number of 16-query fragments per warp: 1 or 2.
    pub fragments: usize,
    /// The number of keys per tile: 32 or 64.
    pub columns: usize,
}

impl BiasGradientTiles {
    /// The number of stages (shared-memory buffers). Each stage holds one chunk of operands. The warps multiply the
    /// chunk in one stage while the copies to the two other stages are in flight.
    pub const STAGES: usize = 3;

    /// Returns the tiles for head size `head_dim` of Q and K, and head size `value_dim` of V.
    ///
    /// The bias gradient was measured on an H100 (2026-11-26), with operands of `[4, 8, 2048, 64]` and a bias of
    /// `[1, 8, 2048, 2048]`. One fragment per warp takes 0.31 ms, with 12 warps on a multiprocessor. Two fragments per warp
    /// take 0.38 ms, with 8 warps. CTAs of 16 warps also take 0.38 ms.
    pub(crate) const fn new([head_dim, value_dim]: [usize; 2], half: Half) -> Self {
        Self {
            head_dim,
            value_dim,
            half,
            warps: 4,
            fragments: 1,
            columns: 64,
        }
    }

    /// The number of queries per tile.
    pub const fn rows(&self) -> usize {
        self.warps * self.warp_rows()
    }

    /// The number of queries per warp.
    pub const fn warp_rows(&self) -> usize {
        FRAGMENT_ROWS * self.fragments
    }

    /// The number of threads per CTA.
    pub const fn units(&self) -> usize {
        32 * self.warps
    }

    /// The number of 64-column chunks of Q. K has the same number of chunks.
    pub const fn dot_chunks(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// The number of chunks for one query tile and one key tile. These are the chunks of Q and K for the GEMM of S, and
    /// the chunks of dO and V for the GEMM of dP.
    pub const fn chunks(&self) -> usize {
        self.dot_chunks() + self.value_dim.div_ceil(SUBTILE)
    }

    /// The number of columns in the `chunk`-th chunk of an operand with `width` columns, padded to `mma` steps of 16.
    pub const fn depth(width: usize, chunk: usize) -> usize {
        let left = width - chunk * SUBTILE;
        if left < SUBTILE {
            left.next_multiple_of(STEP)
        } else {
            SUBTILE
        }
    }

    /// The byte offset in a stage (shared-memory buffer) at which the rows of K or V begin. They lie behind the rows of
    /// Q or dO.
    pub const fn key_rows_at(&self) -> usize {
        self.rows() * ROW_BYTES
    }

    /// The bytes of a stage, which is the shared-memory buffer of one chunk.
    pub const fn stage_bytes(&self) -> usize {
        (self.rows() + self.columns) * ROW_BYTES
    }

    /// The bytes of shared memory per CTA.
    pub const fn shared_memory(&self) -> usize {
        Self::STAGES * self.stage_bytes()
    }

    /// The lengths of the register vectors: the scores of one fragment, its packed probabilities, and all scores of a warp.
    pub const fn vectors(&self) -> [usize; 3] {
        let scores = registers(self.columns / 2);
        [scores, registers(self.columns / 4), self.fragments * scores]
    }
}

/// Returns the tiles of the bias gradient of `problem`.
///
/// # Errors
/// Returns a [`Refusal`] if the device lacks the `mma` instructions, or if the kernel of the bias gradient cannot serve
/// the problem.
pub(crate) fn bias_gradient_tiles(
    problem: &AttentionProblem,
    device: &DeviceProfile,
) -> Result<BiasGradientTiles, Refusal> {
    let half = check(problem, device)?;
    let tiles = BiasGradientTiles::new([problem.head_dim, problem.value_dim], half);
    if tiles.shared_memory() > device.shared_memory || tiles.units() > device.units_per_cube {
        return Err(Refusal::Tiles {
            width: problem.head_dim.max(problem.value_dim),
            shared_memory: device.shared_memory,
            units: device.units_per_cube,
        });
    }
    check_mask(problem, [(Side::Queries, tiles.rows(), tiles.columns)])?;
    Ok(tiles)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::bias_gradient::plan::{BiasGradientPlan, BiasSum, BiasTiles};
    use crate::testing::{self, SHARED_MEMORY};
    use crate::types::refusal::Feature;
    use burn::tensor::DType;

    fn card(shared_memory: usize) -> DeviceProfile {
        DeviceProfile {
            features: vec![
                Feature::CopyAsync,
                Feature::Mma(DType::BF16),
                Feature::LoadMatrix(DType::BF16),
            ],
            multiprocessors: Some(132),
            ..testing::card(shared_memory)
        }
    }

    fn biased(sizes: [usize; 6], shape: [usize; 4]) -> AttentionProblem {
        AttentionProblem {
            bias: Some((shape, DType::BF16)),
            ..testing::problem(sizes)
        }
    }

    #[test]
    fn tiles_any_width_fit_every_card() {
        for shared_memory in SHARED_MEMORY {
            for width in crate::engine::tiling::NARROWEST..=crate::problem::MAX_HEAD_DIM {
                let problem = biased([1, 2, 1, 300, 200, width], [1, 2, 300, 200]);
                let tiles = bias_gradient_tiles(&problem, &card(shared_memory));
                let tiles = tiles.unwrap_or_else(|refusal| panic!("{width}: {refusal}"));
                assert!(tiles.shared_memory() <= shared_memory, "{tiles:?}");
                // The swizzle permutes 16-byte pieces by the row number modulo 8. Each stage, and the rows of K or V in a
                // stage, must therefore start at a multiple of eight rows.
                assert!(
                    tiles.stage_bytes().is_multiple_of(8 * ROW_BYTES),
                    "{tiles:?}"
                );
                assert!(
                    tiles.key_rows_at().is_multiple_of(8 * ROW_BYTES),
                    "{tiles:?}"
                );
                // A visit is the work on one query tile of one head and sequence. During a visit, the kernel already
                // starts to copy the first two chunks of the next visit. Each visit therefore needs at least two
                // chunks.
                assert!(tiles.chunks() >= BiasGradientTiles::STAGES - 1, "{tiles:?}");
                let depth: usize = (0..tiles.dot_chunks())
                    .map(|chunk| BiasGradientTiles::depth(width, chunk))
                    .sum();
                assert_eq!(depth, width.next_multiple_of(STEP), "{tiles:?}");
            }
        }
    }

    #[test]
    fn tiles_without_matrix_units_are_summed_by_units() {
        let problem = biased([1, 2, 1, 300, 200, 64], [1, 2, 300, 200]);
        for (problem, device) in [
            (problem.clone(), testing::card(SHARED_MEMORY[0])),
            (problem.clone(), card(32 << 10)),
        ] {
            assert!(bias_gradient_tiles(&problem, &device).is_err());
            let plan = BiasGradientPlan::on_matrix_units(&problem, &device, 4)
                .expect("the problem is served")
                .expect("the problem has a bias");
            assert!(matches!(plan.tiles, BiasTiles::Units(_)), "{plan:?}");
        }
    }

    #[test]
    fn plan_broadcast_bias_is_divided_into_parts() {
        for (shape, divided) in [
            ([4, 8, 2048, 2048], false),
            ([1, 8, 2048, 2048], false),
            ([1, 8, 1, 2048], true),
            ([1, 1, 1, 2048], true),
        ] {
            let problem = biased([4, 8, 8, 2048, 2048, 64], shape);
            let plan = BiasGradientPlan::on_matrix_units(&problem, &card(SHARED_MEMORY[0]), 4)
                .expect("the problem is served")
                .expect("the problem has a bias");
            assert!(matches!(plan.tiles, BiasTiles::MatrixUnits(_)), "{plan:?}");
            let BiasSum::Scores { parts } = plan.sum else {
                panic!("{plan:?}");
            };
            assert_eq!(parts > 1, divided, "{shape:?}: {plan:?}");
        }
    }
    #[test]
    fn plan_parts_have_two_tiles_of_scores_at_least() {
        for (shape, expected) in [
            ([3, 2, 130, 66], 1),
            ([1, 2, 130, 66], 2),
            ([1, 1, 130, 66], 3),
            ([1, 1, 1, 66], 9),
        ] {
            let problem = biased([3, 2, 1, 130, 66, 16], shape);
            let plan = BiasGradientPlan::on_matrix_units(&problem, &card(SHARED_MEMORY[0]), 4)
                .expect("the problem is served")
                .expect("the problem has a bias");
            assert_eq!(
                plan.sum,
                BiasSum::Scores { parts: expected },
                "{shape:?}: {plan:?}"
            );
        }
    }
}
