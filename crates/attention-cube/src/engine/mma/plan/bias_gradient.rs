//! The tiles of the bias gradient on matrix units, and their shared memory.

use super::check;
use super::split_m::STEP;
use crate::AttentionProblem;
use crate::device::DeviceProfile;
use crate::math::side::Side;
use crate::passes::mask_bits::plan::check_mask;
use crate::select::Refusal;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::hopper::{Half, ROW_BYTES, SUBTILE, registers};

/// A tile of the bias gradient: each warp has rows of queries and all keys of the tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BiasGradientTiles {
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Warps of a cube.
    pub warps: usize,
    /// Fragments of 16 queries that a warp has: 1 or 2.
    pub fragments: usize,
    /// Keys of a tile: 32 or 64.
    pub columns: usize,
}

impl BiasGradientTiles {
    /// Chunks in shared memory: one is multiplied while two are copied.
    pub const STAGES: usize = 3;

    /// Tiles for operands of these widths, of keys and of values.
    ///
    /// On an H100 (2026-11-26), `[4, 8, 2048, 64]` with a bias of `[1, 8, 2048, 2048]`, the bias gradient alone: 0.31 ms with one
    /// fragment a warp, of which 12 warps share a multiprocessor; 0.38 ms with two fragments and 8 warps; 0.38 ms with 16 warps a cube.
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

    /// Queries of a tile.
    pub const fn rows(&self) -> usize {
        self.warps * self.warp_rows()
    }

    /// Queries of a warp.
    pub const fn warp_rows(&self) -> usize {
        FRAGMENT_ROWS * self.fragments
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        32 * self.warps
    }

    /// Chunks of queries and keys, 64 columns each.
    pub const fn dot_chunks(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// Chunks of queries and keys, and of output gradients and values.
    pub const fn chunks(&self) -> usize {
        self.dot_chunks() + self.value_dim.div_ceil(SUBTILE)
    }

    /// Columns of an operand of this width that its `chunk`-th chunk multiplies: whole steps.
    pub const fn depth(width: usize, chunk: usize) -> usize {
        let left = width - chunk * SUBTILE;
        if left < SUBTILE {
            left.next_multiple_of(STEP)
        } else {
            SUBTILE
        }
    }

    /// The offset of the keys or values in a stage, behind the queries or output gradients.
    pub const fn key_rows_at(&self) -> usize {
        self.rows() * ROW_BYTES
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(&self) -> usize {
        (self.rows() + self.columns) * ROW_BYTES
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        Self::STAGES * self.stage_bytes()
    }

    /// Sizes of the vectors of a fragment's scores, of its packed probabilities, and of all scores of a warp.
    pub const fn vectors(&self) -> [usize; 3] {
        let scores = registers(self.columns / 2);
        [scores, registers(self.columns / 4), self.fragments * scores]
    }
}

/// The tiles of the bias gradient of `problem`.
///
/// # Errors
/// The [`Refusal`] where the device has no such products or the problem does not fit.
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
    use crate::device::Feature;
    use crate::passes::bias_gradient::plan::{BiasGradientPlan, BiasSum, BiasTiles};
    use crate::testing::{self, SHARED_MEMORY};
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
            for width in crate::division::NARROWEST..=crate::problem::MAX_HEAD_DIM {
                let problem = biased([1, 2, 1, 300, 200, width], [1, 2, 300, 200]);
                let tiles = bias_gradient_tiles(&problem, &card(shared_memory));
                let tiles = tiles.unwrap_or_else(|refusal| panic!("{width}: {refusal}"));
                assert!(tiles.shared_memory() <= shared_memory, "{tiles:?}");
                // A row's pieces are permuted by its number among eight.
                assert!(
                    tiles.stage_bytes().is_multiple_of(8 * ROW_BYTES),
                    "{tiles:?}"
                );
                assert!(
                    tiles.key_rows_at().is_multiple_of(8 * ROW_BYTES),
                    "{tiles:?}"
                );
                // The chunks of the next visit that are copied ahead are chunks of it.
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
                .expect("a plan")
                .expect("a bias");
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
                .expect("a plan")
                .expect("a bias");
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
                .expect("a plan")
                .expect("a bias");
            assert_eq!(
                plan.sum,
                BiasSum::Scores { parts: expected },
                "{shape:?}: {plan:?}"
            );
        }
    }
}
