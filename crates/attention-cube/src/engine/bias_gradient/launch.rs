//! Launches the kernels that compute the bias gradient.

use crate::auxiliary::bias_gradient::rows::{SpreadLaunch, constant_bias_gradient};
use crate::auxiliary::bias_gradient::scores;
use crate::auxiliary::bias_gradient::scores::BiasCountsLaunch;
use crate::auxiliary::bias_gradient::scores::Broadcast;
use crate::auxiliary::lengths::BoundsOffsets;
use crate::auxiliary::reduce::sum_parts;
use crate::engine::backward_pass::BackwardPass;
use crate::engine::bias_gradient::plan::{BiasGradientPlan, BiasSum, BiasTiles};
use crate::kernel_args::head_sizes;
use crate::kernel_args::{grid, tensor_arg};
use crate::math::schedule::GridLaunch;
use crate::problem::AttentionProblem;
use crate::tile_ops::tiles::UnitTiles;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

const UNITS: usize = 128;

/// Returns the number of elements per load of partial sums: 4 if the number of bias elements is a multiple of 4, else
/// 1.
fn vector_of(bias: &CubeTensor) -> usize {
    match bias.meta.shape().num_elements().is_multiple_of(4) {
        true => 4,
        false => 1,
    }
}

/// Computes the bias gradient according to its plan. `offsets` locates the sequence lengths and segment bounds in the
/// buffer that packs them.
///
/// # Shapes
/// `bias` is `[batch or 1, q_heads or 1, q_len or 1, kv_len or 1]`, and the gradient has the shape and dtype of `bias`.
pub(crate) fn bias_gradient(
    pass: &BackwardPass<'_>,
    bias: &CubeTensor,
    plan: BiasGradientPlan,
    offsets: BoundsOffsets,
) -> CubeTensor {
    match plan.sum {
        BiasSum::Scores { parts: 1 } => {
            let gradient = empty(&pass.rows, bias.meta.shape().clone(), bias.dtype);
            pass.over_scores(bias, plan.tiles, offsets, 1, &gradient);
            gradient
        }
        BiasSum::Scores { parts } => {
            let partial = pass.parts_of(bias, parts);
            pass.over_scores(bias, plan.tiles, offsets, parts, &partial);
            sum_parts(&partial, 0, parts, bias, None, vector_of(bias))
        }
        BiasSum::Queries { parts } => {
            let partial = pass.parts_of(bias, parts);
            pass.over_queries(bias, parts, &partial);
            sum_parts(&partial, 0, parts, bias, None, vector_of(bias))
        }
    }
}

/// The launch grid, over the tiles of a bias, of the kernel that recomputes the scores.
pub(crate) struct BiasGrid {
    pub key_tiles: usize,
    pub cubes: usize,
    pub grid: GridLaunch,
    pub broadcast: Broadcast,
}

impl BiasGrid {
    /// Builds the launch grid for bias tiles of `rows` queries and `columns` keys. For each tile, `parts` cubes compute
    /// partial sums.
    pub(crate) fn new(
        bias: &CubeTensor,
        problem: &AttentionProblem,
        [rows, columns]: [usize; 2],
        parts: usize,
    ) -> Self {
        let shape = bias.meta.shape();
        let key_tiles = shape[3].div_ceil(columns);
        let tiles = shape[2].div_ceil(rows) * key_tiles;
        let (cubes, grid) = grid(tiles, parts, shape[1], shape[0], usize::MAX);
        Self {
            key_tiles,
            cubes,
            grid,
            broadcast: Broadcast {
                batch: shape[0] != problem.batch,
                heads: shape[1] != problem.q_heads,
                queries: shape[2] != problem.q_len,
            },
        }
    }
}

impl BackwardPass<'_> {
    /// Allocates `parts` partial gradients of `bias` in f32, one after another along the first dimension.
    fn parts_of(&self, bias: &CubeTensor, parts: usize) -> CubeTensor {
        let shape = bias.meta.shape();
        let shape = [parts * shape[0], shape[1], shape[2], shape[3]];
        empty(&self.rows, shape, DType::F32)
    }

    fn over_queries(&self, bias: &CubeTensor, parts: usize, target: &CubeTensor) {
        let AttentionProblem {
            batch,
            q_heads,
            q_len,
            ..
        } = *self.problem;
        let client = self.rows.client.clone();
        let shape = bias.meta.shape();
        let repeats = |dim: usize, whole: usize| whole / shape[dim];
        let (heads, queries) = (repeats(1, q_heads), repeats(2, q_len));
        let numbers = shape.num_elements();
        let sinks = self.inputs.sinks.as_option();
        let sink_dtype = sinks.map_or(DType::F32, |sinks| sinks.dtype);
        let gradient = self.logsumexp_gradient.as_ref();
        // SAFETY: `numbers` is the number of bias elements. Unit `i` writes only element `i` of `target`, and returns at once
        // if `i` is at least `numbers · parts`. The kernel reads all other tensors at indices below `batch`, `q_heads` and
        // `q_len`.
        unsafe {
            constant_bias_gradient::launch_unchecked(
                &client,
                cube_count(&client, (numbers * parts).div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                address_type(
                    [&self.rows, &self.logsumexp, target]
                        .into_iter()
                        .chain(gradient),
                ),
                tensor_arg(&self.rows),
                tensor_arg(&self.logsumexp),
                gradient.map(tensor_arg).into(),
                sinks.map(tensor_arg).into(),
                tensor_arg(target),
                SpreadLaunch::new(
                    shape[1] as u32,
                    shape[2] as u32,
                    numbers as u32,
                    heads as u32,
                    queries as u32,
                    (repeats(0, batch) * heads * queries) as u32,
                    parts as u32,
                ),
                q_len as u32,
                dtype_to_storage_type(sink_dtype),
            );
        }
    }

    fn over_scores(
        &self,
        bias: &CubeTensor,
        tiles: BiasTiles,
        offsets: BoundsOffsets,
        parts: usize,
        target: &CubeTensor,
    ) {
        match tiles {
            BiasTiles::Units(tiles) => self.on_units(bias, tiles, offsets, parts, target),
            #[cfg(feature = "cuda")]
            BiasTiles::MatrixUnits(tiles) => {
                self.bias_on_matrix_units(bias, tiles, offsets, parts, target);
            }
            #[cfg(not(feature = "cuda"))]
            BiasTiles::MatrixUnits(_) => {
                unreachable!(
                    "only engines of the feature `cuda` plan bias gradients on matrix units"
                )
            }
        }
    }

    fn on_units(
        &self,
        bias: &CubeTensor,
        tiles: UnitTiles,
        offsets: BoundsOffsets,
        parts: usize,
        target: &CubeTensor,
    ) {
        let (problem, optional_inputs) = (self.problem, &self.optional_inputs);
        let client = self.rows.client.clone();
        let BiasGrid {
            key_tiles,
            cubes,
            grid,
            broadcast,
        } = BiasGrid::new(bias, problem, [tiles.rows, tiles.columns()], parts);
        // SAFETY: the kernel reads queries at rows below `q_len`, and keys and values at rows below `kv_len`. It writes
        // elements of the bias gradient to `target`, which has room for `parts` partial gradients. The launch grid limits the
        // indices of heads and sequences.
        unsafe {
            scores::bias_gradient::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units as u32),
                self.addresses(&[target]),
                self.operands(),
                optional_inputs.scoring(offsets, problem),
                tensor_arg(target),
                grid,
                head_sizes(problem),
                BiasCountsLaunch::new(
                    problem.batch as u32,
                    problem.q_heads as u32,
                    key_tiles as u32,
                ),
                broadcast,
                self.kind(tiles),
                [
                    dtype_to_storage_type(problem.dtype),
                    optional_inputs.mask_element,
                    optional_inputs.bias_element,
                    dtype_to_storage_type(target.dtype),
                ],
                tiles.vector,
            );
        }
    }
}
