//! Launches the gradient of the bias.

use crate::AttentionProblem;
use crate::arguments::{grid, score_arguments};
use crate::passes::backward::BackwardPass;
use crate::passes::bias_gradient::plan::{BiasGradientPlan, BiasSum, BiasTiles};
use crate::passes::bias_gradient::rows::{SpreadLaunch, constant_bias_gradient};
use crate::passes::bias_gradient::scores::{Broadcast, bias_gradient};
use crate::passes::lengths::Places;
use crate::tile::tiles::UnitTiles;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

const UNITS: usize = 128;

/// Numbers of a load of the parts of this bias's gradient.
fn vector_of(bias: &CubeTensor) -> usize {
    match bias.meta.shape().num_elements().is_multiple_of(4) {
        true => 4,
        false => 1,
    }
}

impl BackwardPass<'_> {
    /// The bias's gradient, as the plan sums it. The kernel over scores finds the integers at `places`.
    pub(crate) fn bias(
        &self,
        bias: &CubeTensor,
        plan: BiasGradientPlan,
        places: Places,
    ) -> CubeTensor {
        match plan.sum {
            BiasSum::Scores { parts: 1 } => {
                let gradient = empty(&self.rows, bias.meta.shape().clone(), bias.dtype);
                self.over_scores(bias, plan.tiles, places, 1, &gradient);
                gradient
            }
            BiasSum::Scores { parts } => {
                let partial = self.parts_of(bias, parts);
                self.over_scores(bias, plan.tiles, places, parts, &partial);
                self.sum(&partial, 0, parts, bias, None, vector_of(bias))
            }
            BiasSum::Queries { parts } => {
                let partial = self.parts_of(bias, parts);
                self.over_queries(bias, parts, &partial);
                self.sum(&partial, 0, parts, bias, None, vector_of(bias))
            }
        }
    }

    /// For gradients of `bias` one after the other.
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
        // SAFETY: a unit a number of the target, the rest stops at once; queries, heads and sequences stay below their number.
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
                Self::arg(&self.rows),
                Self::arg(&self.logsumexp),
                gradient.map(Self::arg).into(),
                sinks.map(Self::arg).into(),
                Self::arg(target),
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
        places: Places,
        parts: usize,
        target: &CubeTensor,
    ) {
        match tiles {
            BiasTiles::Units(tiles) => self.on_units(bias, tiles, places, parts, target),
            #[cfg(feature = "cuda")]
            BiasTiles::MatrixUnits(tiles) => {
                self.bias_on_matrix_units(bias, tiles, places, parts, target);
            }
            #[cfg(not(feature = "cuda"))]
            BiasTiles::MatrixUnits(_) => {
                unreachable!("only the engines of the feature `cuda` plan matrix units")
            }
        }
    }

    fn on_units(
        &self,
        bias: &CubeTensor,
        tiles: UnitTiles,
        places: Places,
        parts: usize,
        target: &CubeTensor,
    ) {
        let (problem, inputs, extras) = (self.problem, &self.inputs, &self.extras);
        let client = self.rows.client.clone();
        let shape = bias.meta.shape();
        let key_tiles = shape[3].div_ceil(tiles.columns());
        let (cubes, grid) = grid(
            shape[2].div_ceil(tiles.rows) * key_tiles,
            parts,
            shape[1],
            shape[0],
            usize::MAX,
        );
        let broadcast = Broadcast {
            batch: shape[0] != problem.batch,
            heads: shape[1] != problem.q_heads,
            queries: shape[2] != problem.q_len,
        };
        // SAFETY: as for the query's gradient.
        unsafe {
            bias_gradient::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units as u32),
                self.addresses(&[target]),
                Self::arg(&inputs.query),
                Self::arg(&inputs.key),
                Self::arg(&inputs.value),
                Self::arg(&self.output_gradient),
                Self::arg(&self.rows),
                extras.mask().into(),
                extras.bias().into(),
                extras.lengths_and_ids().into(),
                Self::arg(target),
                grid,
                places.extent(problem),
                score_arguments(problem),
                problem.batch as u32,
                problem.q_heads as u32,
                problem.group() as u32,
                problem.head_dim as u32,
                problem.value_dim as u32,
                key_tiles as u32,
                broadcast,
                self.kind(tiles),
                dtype_to_storage_type(problem.dtype),
                extras.mask_element,
                extras.bias_element,
                dtype_to_storage_type(target.dtype),
                tiles.vector,
            );
        }
    }
}
