//! The plan of the bias's gradient: the tiles of its scores, and in how many parts they are summed.

use crate::AttentionProblem;
use crate::device::{ASSUMED_MULTIPROCESSORS, DeviceProfile, SOFTWARE_ITERATIONS};
use crate::engine::mma::plan::{BiasGradientTiles, bias_gradient_tiles};
use crate::select::Refusal;
use crate::tile::table::{SINGLE, choose};
use crate::tile::tiles::UnitTiles;

/// Cubes a multiprocessor that the gradient is divided among.
const CUBES_PER_MULTIPROCESSOR: usize = 8;

/// How the gradient of a bias is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BiasGradientPlan {
    /// Tiles of the scores.
    pub tiles: BiasTiles,
    /// What is summed.
    pub sum: BiasSum,
}

/// The tiles of the scores, and what multiplies them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BiasTiles {
    /// Scalar units, in f32.
    Units(UnitTiles),
    /// The matrix units of the mma engine, for every engine that takes half precision.
    MatrixUnits(BiasGradientTiles),
}

impl BiasTiles {
    /// Queries of a tile.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Units(tiles) => tiles.rows,
            Self::MatrixUnits(tiles) => tiles.rows(),
        }
    }

    /// Keys of a tile.
    pub(crate) fn columns(&self) -> usize {
        match self {
            Self::Units(tiles) => tiles.columns(),
            Self::MatrixUnits(tiles) => tiles.columns,
        }
    }

    /// Tiles of scores that a part has at least, where there are so many. On matrix units a cube copies one tile while it multiplies
    /// another, and each part is written to memory and read again.
    fn least_summed(&self) -> usize {
        match self {
            Self::Units(_) => 1,
            Self::MatrixUnits(_) => 2,
        }
    }

    /// Iterations of a unit's loops for a tile of scores, where a software driver limits these.
    fn iterations(&self, columns: usize) -> usize {
        match self {
            // The scores are summed in registers: no product accumulates.
            Self::Units(tiles) => tiles.block_iterations(columns, 0, false),
            Self::MatrixUnits(_) => 1,
        }
    }
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
        let tiles = BiasTiles::Units(choose(SINGLE, problem.head_dim, 0, device, vector)?);
        Ok(Some(Self::with(shape, problem, device, tiles)))
    }

    /// The gradient of the problem's bias for an engine whose operands have rows of whole pieces of 16 bytes: on matrix units
    /// where the device has them.
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

    /// Iterations of all loops of a unit, at most.
    pub(crate) fn iterations(&self, problem: &AttentionProblem) -> usize {
        match self.sum {
            BiasSum::Scores { parts } => {
                let tiles = summed(problem, self.tiles.rows()).div_ceil(parts);
                let columns = problem.head_dim + problem.value_dim;
                tiles * self.tiles.iterations(columns)
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
    tiles: &BiasTiles,
) -> BiasSum {
    if columns == 1 {
        // The parts take as long to sum as each of them.
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
            let block = tiles.iterations(problem.head_dim + problem.value_dim);
            summed.div_ceil((SOFTWARE_ITERATIONS / block).max(1))
        }
        None => 1,
    };
    let most = summed.div_ceil(tiles.least_summed()).max(1);
    let parts = wanted.max(needed).clamp(1, most);
    BiasSum::Scores { parts }
}
