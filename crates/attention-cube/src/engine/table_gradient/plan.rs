//! The plan of the gradient of a score mod's table: the size of the score tiles, and the number of partial sums.

use crate::problem::AttentionProblem;
use crate::tile_ops::table::{SINGLE, choose};
use crate::tile_ops::tiles::UnitTiles;
use crate::types::device::{ASSUMED_MULTIPROCESSORS, DeviceProfile, SOFTWARE_ITERATIONS};
use crate::types::refusal::Refusal;

/// The number of cubes per multiprocessor that the plan tries to reach.
const CUBES_PER_MULTIPROCESSOR: usize = 8;

/// The most elements that all partial sums together should have, 64 MiB in f32. Only a software driver's iteration limit
/// may require more.
const MOST_ELEMENTS: usize = 1 << 24;

/// The plan of the gradient of a score mod's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TableGradientPlan {
    /// The sizes of the score tiles, which scalar units compute in f32.
    pub tiles: UnitTiles,
    /// The number of partial sums that fills the device.
    pub parts: usize,
    /// The fewest partial sums with which no cube exceeds a software driver's iteration limit.
    pub least_parts: usize,
}

impl TableGradientPlan {
    /// Plans the gradient, with loads of `vector` elements. Returns `None` if no table has a gradient.
    pub(crate) fn new(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        vector: usize,
    ) -> Result<Option<Self>, Refusal> {
        if problem.learned_code().is_none() {
            return Ok(None);
        }
        let tiles = choose(SINGLE, problem.head_dim, 0, device, vector)?;
        let count = score_tiles(problem, &tiles).max(1);
        let least_parts = match device.processors {
            Some(_) => {
                let columns = problem.head_dim + problem.value_dim;
                let of_tile = tiles.block_iterations(columns, 0, false)
                    + problem.mask_search(1, tiles.rows, tiles.columns())
                    + tiles.rows * tiles.columns();
                count.div_ceil((SOFTWARE_ITERATIONS / of_tile).max(1))
            }
            None => 1,
        };
        let wanted =
            device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS) * CUBES_PER_MULTIPROCESSOR;
        Ok(Some(Self {
            tiles,
            parts: wanted.clamp(least_parts, count),
            least_parts,
        }))
    }

    /// Returns the number of partial sums for a table of `elements` elements.
    #[cfg(feature = "cube")]
    pub(crate) fn parts_for(&self, elements: usize) -> usize {
        let most = (MOST_ELEMENTS / elements.max(1)).max(self.least_parts);
        self.parts.min(most)
    }
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

    /// Checks that the kernel's exchange buffers fit in the shared memory that the tiles count for P, which this kernel does
    /// not store. The buffers have 8 bytes per score of one row, and P has 4 bytes per score.
    #[test]
    fn table_gradient_tiles_leave_room_for_the_exchange() {
        for shared_memory in [16 << 10, 32 << 10, 48 << 10, 99 << 10] {
            for head_dim in [8, 32, 64, 128, 256, 512, 1024] {
                let problem = AttentionProblem {
                    score_mod: Some(ScoreCode::learned::<Alibi>()),
                    ..problem([1, 4, 2, 256, 256, head_dim])
                };
                let plan = TableGradientPlan::new(&problem, &card(shared_memory), 4)
                    .expect("some tiles fit")
                    .expect("the table has a gradient");
                assert!(plan.tiles.rows_per_unit() >= 2, "{head_dim}: {plan:?}");
            }
        }
    }
}
