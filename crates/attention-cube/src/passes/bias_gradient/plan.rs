//! The plan of the bias's gradient: the tiles of its scores, and in how many parts they are summed.

use crate::AttentionProblem;
use crate::device::{ASSUMED_MULTIPROCESSORS, DeviceProfile, SOFTWARE_ITERATIONS};
use crate::select::Refusal;
use crate::tile::table::{SINGLE, choose};
use crate::tile::tiles::UnitTiles;

/// Cubes a multiprocessor that the gradient is divided among.
const CUBES_PER_MULTIPROCESSOR: usize = 8;

/// How the gradient of a bias is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BiasGradientPlan {
    /// Tiles of the scores.
    pub tiles: UnitTiles,
    /// What is summed.
    pub sum: BiasSum,
}

/// How the gradient of a bias is summed. What too few cubes would sum alone is summed in parts, and then these, always in the
/// same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BiasSum {
    /// Over the tiles of scores that a tile of the bias is broadcast along.
    Scores {
        /// Of each tile of the bias.
        parts: usize,
    },
    /// Over the queries, whatever they see: a bias that is the same for all keys.
    Queries {
        /// Of each number of the bias.
        parts: usize,
    },
}

impl BiasGradientPlan {
    /// Of the problem's bias, if it has one, for loads of `vector` elements.
    pub(crate) fn new(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        vector: usize,
    ) -> Result<Option<Self>, Refusal> {
        let Some((shape, _)) = problem.bias else {
            return Ok(None);
        };
        let tiles = choose(SINGLE, problem.head_dim, 0, device, vector)?;
        let sum = sum(shape, problem, device, &tiles);
        Ok(Some(Self { tiles, sum }))
    }

    /// Iterations of all loops of a unit, at most.
    pub(crate) fn iterations(&self, problem: &AttentionProblem) -> usize {
        match self.sum {
            BiasSum::Scores { parts } => {
                let tiles = summed(problem, self.tiles.rows).div_ceil(parts);
                let columns = problem.head_dim + problem.value_dim;
                // The scores are summed in registers: no product accumulates.
                tiles * self.tiles.block_iterations(columns, 0, false)
            }
            BiasSum::Queries { parts } => parts.max(summed(problem, 1).div_ceil(parts)),
        }
    }
}

/// What is summed for a number of the bias, of as many queries at a time as are `rows`.
fn summed(problem: &AttentionProblem, rows: usize) -> usize {
    let along = |size: usize, whole: usize| if size == 1 { whole } else { 1 };
    problem.bias.map_or(0, |([batch, heads, queries, _], _)| {
        along(batch, problem.batch)
            * along(heads, problem.q_heads)
            * along(queries, problem.q_len.div_ceil(rows))
    })
}

/// How the gradient of a bias of this shape is summed, over scores by `tiles`.
fn sum(
    [batch, heads, rows, columns]: [usize; 4],
    problem: &AttentionProblem,
    device: &DeviceProfile,
    tiles: &UnitTiles,
) -> BiasSum {
    if columns == 1 {
        // The parts take as long to sum as each of them.
        let parts = summed(problem, 1).isqrt().max(1);
        return BiasSum::Queries { parts };
    }
    let summed = summed(problem, tiles.rows);
    let cubes = batch * heads * rows.div_ceil(tiles.rows) * columns.div_ceil(tiles.columns());
    let wanted = device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS)
        * CUBES_PER_MULTIPROCESSOR
        / cubes.max(1);
    let needed = match device.processors {
        Some(_) => {
            let block = tiles.block_iterations(problem.head_dim + problem.value_dim, 0, false);
            summed.div_ceil((SOFTWARE_ITERATIONS / block).max(1))
        }
        None => 1,
    };
    let parts = wanted.max(needed).clamp(1, summed.max(1));
    BiasSum::Scores { parts }
}
