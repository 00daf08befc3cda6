//! The plan of the bias gradient: the size of the score tiles, and the number of partial sums.

use crate::engine::tensor_core::mma::plan::{BiasGradientTiles, bias_gradient_tiles};
use crate::problem::AttentionProblem;
use crate::tile_ops::table::{SINGLE, choose};
use crate::tile_ops::tiles::UnitTiles;
use crate::types::device::{ASSUMED_MULTIPROCESSORS, DeviceProfile, SOFTWARE_ITERATIONS};
use crate::types::refusal::Refusal;

/// The number of cubes per multiprocessor that the plan tries to reach. If one cube per bias tile would give fewer
/// cubes, several cubes compute partial sums of each tile.
const CUBES_PER_MULTIPROCESSOR: usize = 8;

/// The plan of a bias gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BiasGradientPlan {
    /// The sizes of the score tiles, and the hardware that computes them.
    pub tiles: BiasTiles,
    /// The method that sums the gradient, with the number of partial sums.
    pub sum: BiasSum,
}

/// The tiles that divide the scores. The variants differ in the hardware that computes the GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BiasTiles {
    /// Scalar units compute the GEMMs in f32.
    Units(UnitTiles),
    /// The tensor cores compute the GEMMs in half precision, with a kernel of the mma engine.
    MatrixUnits(BiasGradientTiles),
}

impl BiasTiles {
    /// The number of queries in a tile.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Units(tiles) => tiles.rows,
            Self::MatrixUnits(tiles) => tiles.rows(),
        }
    }

    /// The number of keys in a tile.
    pub(crate) fn columns(&self) -> usize {
        match self {
            Self::Units(tiles) => tiles.columns(),
            Self::MatrixUnits(tiles) => tiles.columns,
        }
    }

    /// The fewest score tiles that one cube sums, if there are enough tiles. With tensor cores, the minimum is 2,
    /// because a cube copies the next tile while it multiplies the current tile. A minimum of 2 also halves the largest
    /// number of partial sums. A second kernel has to add these partial sums.
    fn least_summed(&self) -> usize {
        match self {
            Self::Units(_) => 1,
            Self::MatrixUnits(_) => 2,
        }
    }

    /// Returns the number of loop iterations that a unit needs for one score tile. Software drivers limit the
    /// iterations, see [`SOFTWARE_ITERATIONS`].
    fn iterations(&self, problem: &AttentionProblem) -> usize {
        let columns = problem.head_dim + problem.value_dim;
        match self {
            // The scores stay in registers. The kernel runs only the GEMMs that compute S and dP.
            Self::Units(tiles) => {
                tiles.block_iterations(columns, 0, false)
                    + problem.mask_search(1, tiles.rows, tiles.columns())
            }
            Self::MatrixUnits(_) => 1,
        }
    }
}

/// The method that sums a bias gradient. If there are too few bias tiles to fill the device, several cubes compute partial
/// sums of a tile. A second kernel adds the partial sums in a fixed order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BiasSum {
    /// The kernel recomputes the scores, and sums dS over all score tiles that read a bias tile.
    Scores {
        /// The number of partial sums per tile of the bias.
        parts: usize,
    },
    /// The bias does not vary along the keys. Its gradient is a sum over queries, and the kernel computes this sum
    /// without any score.
    Queries {
        /// The number of partial sums per bias element.
        parts: usize,
    },
}

impl BiasGradientPlan {
    /// Plans the gradient of the problem's bias on scalar units, with loads of `vector` elements. Returns `None` without a
    /// bias.
    pub(crate) fn new(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        vector: usize,
    ) -> Result<Option<Self>, Refusal> {
        let Some((shape, _)) = problem.bias else {
            return Ok(None);
        };
        let tiles = BiasTiles::Units(choose(SINGLE, problem.head_dim, 0, device, vector)?);
        Ok(Some(Self::with(shape, problem, device, tiles)))
    }

    /// Plans the gradient of the problem's bias for an engine that reads operand rows in multiples of 16 bytes. The
    /// launch first copies operands whose rows have other sizes. The plan uses tensor cores if the device has them.
    pub(crate) fn on_matrix_units(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        vector: usize,
    ) -> Result<Option<Self>, Refusal> {
        let shape = problem.bias.map(|(shape, _)| shape);
        match (shape, bias_gradient_tiles(problem, device)) {
            (Some(shape), Ok(tiles)) => {
                let tiles = BiasTiles::MatrixUnits(tiles);
                Ok(Some(Self::with(shape, problem, device, tiles)))
            }
            _ => Self::new(problem, device, vector),
        }
    }

    fn with(
        shape: [usize; 4],
        problem: &AttentionProblem,
        device: &DeviceProfile,
        tiles: BiasTiles,
    ) -> Self {
        let sum = sum(shape, problem, device, &tiles);
        Self { tiles, sum }
    }

    /// Returns the largest number of loop iterations that a unit runs in any kernel of this plan.
    pub(crate) fn iterations(&self, problem: &AttentionProblem) -> usize {
        match self.sum {
            BiasSum::Scores { parts } => {
                let tiles = summed(problem, self.tiles.rows()).div_ceil(parts);
                tiles * self.tiles.iterations(problem)
            }
            BiasSum::Queries { parts } => parts.max(summed(problem, 1).div_ceil(parts)),
        }
    }
}

/// Returns the number of score tiles whose gradients are added into one bias element. Each score tile has `rows` queries.
fn summed(problem: &AttentionProblem, rows: usize) -> usize {
    let along = |size: usize, whole: usize| if size == 1 { whole } else { 1 };
    problem.bias.map_or(0, |([batch, heads, queries, _], _)| {
        along(batch, problem.batch)
            * along(heads, problem.q_heads)
            * along(queries, problem.q_len.div_ceil(rows))
    })
}

/// Chooses how the gradient of a bias is summed over the bias's broadcast dimensions. The bias is
/// `[batch, heads, rows, columns]`, where size 1 marks a broadcast dimension. `tiles` divide the scores.
fn sum(
    [batch, heads, rows, columns]: [usize; 4],
    problem: &AttentionProblem,
    device: &DeviceProfile,
    tiles: &BiasTiles,
) -> BiasSum {
    if columns == 1 {
        // The number of partial sums is the square root of the number of summed queries. Computing one partial sum then
        // takes about as long as adding all partial sums.
        let parts = summed(problem, 1).isqrt().max(1);
        return BiasSum::Queries { parts };
    }
    let summed = summed(problem, tiles.rows());
    let cubes = batch * heads * rows.div_ceil(tiles.rows()) * columns.div_ceil(tiles.columns());
    let wanted = device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS)
        * CUBES_PER_MULTIPROCESSOR
        / cubes.max(1);
    let needed = match device.processors {
        Some(_) => {
            let block = tiles.iterations(problem);
            summed.div_ceil((SOFTWARE_ITERATIONS / block).max(1))
        }
        None => 1,
    };
    let most = summed.div_ceil(tiles.least_summed()).max(1);
    let parts = wanted.max(needed).clamp(1, most);
    BiasSum::Scores { parts }
}
