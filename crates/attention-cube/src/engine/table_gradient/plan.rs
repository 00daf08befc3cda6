//! The plan of the gradient of a score mod's table: the size of the score tiles, and the number of partial sums.

use crate::engine::tensor_core::mma::plan::{BiasGradientTiles, bias_gradient_tiles};
use crate::problem::AttentionProblem;
use crate::tile_ops::table::{SINGLE, choose};
use crate::tile_ops::tiles::UnitTiles;
use crate::types::device::{ASSUMED_MULTIPROCESSORS, DeviceProfile, SOFTWARE_ITERATIONS};
use crate::types::refusal::Refusal;

/// The number of cubes per multiprocessor that the plan tries to reach.
const CUBES_PER_MULTIPROCESSOR: usize = 8;

/// The most elements that all partial sums together have, 64 MiB in f32. A larger table has one partial sum.
const MOST_ELEMENTS: usize = 1 << 24;

/// The most score tiles. The kernel counts tiles in u32, and adds the number of partial sums to the count.
const MOST_TILES: usize = 1 << 31;

/// The plan of the gradient of a score mod's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TableGradientPlan {
    /// The sizes of the score tiles, and the hardware that computes them.
    pub tiles: TableTiles,
    /// The number of partial sums that fills the device.
    pub parts: usize,
    /// The most score tiles that a cube computes in one launch, or `None` without a limit. Software drivers limit the
    /// iterations of a launch.
    pub tiles_per_cube: Option<usize>,
}

/// The tiles that divide the scores. The variants differ in the hardware that computes the GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TableTiles {
    /// Scalar units compute the GEMMs in f32, for any score mod.
    Units(UnitTiles),
    /// The tensor cores compute the GEMMs in half precision, for score mods that depend on the distance only. A kernel
    /// of the mma engine sums dS along diagonals.
    MatrixUnits {
        /// The tiles of the kernel.
        tiles: BiasGradientTiles,
        /// The number of cubes that share a diagonal of tiles.
        splits: usize,
    },
}

impl TableTiles {
    /// The number of queries in a tile.
    #[cfg(feature = "cube")]
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Units(tiles) => tiles.rows,
            Self::MatrixUnits { tiles, .. } => tiles.rows(),
        }
    }

    /// The number of keys in a tile.
    #[cfg(feature = "cube")]
    pub(crate) fn columns(&self) -> usize {
        match self {
            Self::Units(tiles) => tiles.columns(),
            Self::MatrixUnits { tiles, .. } => tiles.columns,
        }
    }
}

impl TableGradientPlan {
    /// Plans the gradient for an engine that reads operand rows in multiples of 16 bytes. The launch first copies
    /// operands whose rows have other sizes. The plan uses tensor cores if the device has them, and if the score mod
    /// depends on the distance only.
    pub(crate) fn on_matrix_units(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        vector: usize,
    ) -> Result<Option<Self>, Refusal> {
        let of_distance = problem.learned_code().is_some_and(|code| code.of_distance);
        let tiles = match bias_gradient_tiles(problem, device) {
            Ok(tiles) if of_distance && tiles.rows() == tiles.columns => tiles,
            _ => return Self::new(problem, device, vector),
        };
        let diagonals = tile_diagonals(problem, tiles.columns);
        let planes = problem.batch * problem.q_heads;
        let pieces = planes * diagonals * 2 * tiles.columns;
        if pieces > MOST_TILES {
            return Self::new(problem, device, vector);
        }
        let longest = problem.q_len.min(problem.kv_len).div_ceil(tiles.columns);
        let wanted = multiprocessors(device) * CUBES_PER_MULTIPROCESSOR;
        // A cube copies the next tile while it multiplies the current tile, so each cube should have two tiles.
        let splits = (wanted / (planes * diagonals).max(1)).clamp(1, (longest / 2).max(1));
        Ok(Some(Self {
            tiles: TableTiles::MatrixUnits { tiles, splits },
            parts: wanted.clamp(1, pieces.max(1)),
            tiles_per_cube: None,
        }))
    }

    /// Plans the gradient on scalar units, with loads of `vector` elements. Returns `None` if no table has a gradient.
    pub(crate) fn new(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        vector: usize,
    ) -> Result<Option<Self>, Refusal> {
        if problem.learned_code().is_none() {
            return Ok(None);
        }
        let tiles = choose(SINGLE, problem.head_dim, 0, device, vector)?;
        if shared_memory(&tiles) > device.shared_memory {
            return Err(Refusal::Tiles {
                width: problem.head_dim,
                shared_memory: device.shared_memory,
                units: device.units_per_cube,
            });
        }
        let count = score_tiles(problem, &tiles).max(1);
        if count > MOST_TILES {
            return Err(Refusal::ScoreTiles {
                tiles: count,
                limit: MOST_TILES,
            });
        }
        let tiles_per_cube = device.processors.map(|_| {
            let columns = problem.head_dim + problem.value_dim;
            let of_tile = tiles.block_iterations(columns, 0, false)
                + problem.mask_search(1, tiles.rows, tiles.columns())
                + tiles.rows * tiles.columns();
            (SOFTWARE_ITERATIONS / of_tile).max(1)
        });
        let wanted = multiprocessors(device) * CUBES_PER_MULTIPROCESSOR;
        Ok(Some(Self {
            tiles: TableTiles::Units(tiles),
            parts: wanted.clamp(1, count),
            tiles_per_cube,
        }))
    }

    /// Returns the number of partial sums for a table of `elements` elements.
    #[cfg(feature = "cube")]
    pub(crate) fn parts_for(&self, elements: usize) -> usize {
        self.parts.min(MOST_ELEMENTS / elements.max(1)).max(1)
    }
}

fn multiprocessors(device: &DeviceProfile) -> usize {
    device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS)
}

/// Returns the number of tile diagonals, which is the number of differences between a query tile and a key tile. A tile
/// has `size` queries and keys.
pub(crate) fn tile_diagonals(problem: &AttentionProblem, size: usize) -> usize {
    let tiles = problem.q_len.div_ceil(size) + problem.kv_len.div_ceil(size);
    tiles.max(2) - 1
}

/// Returns the bytes of shared memory of the kernel on scalar units: the operands, and the exchanged shares with their
/// elements.
fn shared_memory(tiles: &UnitTiles) -> usize {
    16 * tiles.stage_vectors() + 8 * tiles.units * tiles.columns_per_unit()
}

/// Returns the number of score tiles in all sequences and heads.
pub(crate) fn score_tiles(problem: &AttentionProblem, tiles: &UnitTiles) -> usize {
    problem.batch
        * problem.q_heads
        * problem.q_len.div_ceil(tiles.rows)
        * problem.kv_len.div_ceil(tiles.columns())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score_mod::{Alibi, ScoreCode};
    use crate::testing::{card, problem};
    use crate::types::refusal::Feature;
    use burn::tensor::DType;

    #[test]
    fn table_gradient_has_tiles_for_every_device() {
        for shared_memory in [16 << 10, 32 << 10, 48 << 10, 99 << 10] {
            for head_dim in [8, 32, 64, 128, 256, 512, 1024] {
                let problem = learned([1, 4, 2, 256, 256, head_dim]);
                let plan = TableGradientPlan::new(&problem, &card(shared_memory), 4);
                assert!(matches!(plan, Ok(Some(_))), "{head_dim}: {plan:?}");
            }
        }
    }

    #[test]
    fn table_gradient_of_distances_is_computed_by_tensor_cores() {
        let card = DeviceProfile {
            features: vec![
                Feature::CopyAsync,
                Feature::Mma(DType::BF16),
                Feature::LoadMatrix(DType::BF16),
            ],
            multiprocessors: Some(132),
            ..card(99 << 10)
        };
        for (sizes, expected) in [
            ([4, 16, 16, 4096, 4096, 64], Some(1)),
            ([1, 2, 1, 4096, 4096, 128], Some(4)),
            // Too many pieces of diagonals.
            ([64, 128, 1, 128, 1 << 17, 64], None),
        ] {
            let plan = TableGradientPlan::on_matrix_units(&learned(sizes), &card, 4);
            let plan = plan.expect("the problem is served").expect("a table");
            let splits = match plan.tiles {
                TableTiles::MatrixUnits { splits, .. } => Some(splits),
                TableTiles::Units(_) => None,
            };
            assert_eq!(splits, expected, "{sizes:?}");
        }
    }

    #[test]
    fn table_gradient_of_too_many_tiles_is_refused() {
        let problem = learned([1, 64, 64, 1 << 19, 1 << 19, 64]);
        let plan = TableGradientPlan::new(&problem, &card(99 << 10), 4);
        assert!(matches!(plan, Err(Refusal::ScoreTiles { .. })), "{plan:?}");
    }

    fn learned(sizes: [usize; 6]) -> AttentionProblem {
        AttentionProblem {
            score_mod: Some(ScoreCode::learned::<Alibi>()),
            ..problem(sizes)
        }
    }
}
