//! The launch of the bias gradient on tensor cores.

use crate::auxiliary::lengths::BoundsOffsets;
use crate::engine::backward_pass::BackwardPass;
use crate::engine::bias_gradient::launch::BiasGrid;
use crate::engine::optional_inputs::bias_vector;
use crate::engine::tensor_core::common::bias::BiasReads;
use crate::engine::tensor_core::common::launch::{joined_sizes, scoring};
use crate::engine::tensor_core::mma::backward::bias_gradient::BiasGridLaunch;
use crate::engine::tensor_core::mma::backward::bias_gradient::bias_gradient_split_m;
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use crate::kernel_args::tensor_arg;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::cube_count;
use cubecl::prelude::CubeDim;

impl BackwardPass<'_> {
    /// Writes the gradient of `bias` to `target`. If `parts` is more than 1, the kernel instead writes `parts` partial
    /// gradients to `target`, one after another.
    pub(crate) fn bias_on_matrix_units(
        &self,
        bias: &CubeTensor,
        tiles: BiasGradientTiles,
        offsets: BoundsOffsets,
        parts: usize,
        target: &CubeTensor,
    ) {
        let (problem, optional_inputs) = (self.problem, &self.optional_inputs);
        let client = self.rows.client.clone();
        let shape = bias.meta.shape();
        let BiasGrid {
            key_tiles,
            cubes,
            grid,
            broadcast,
        } = BiasGrid::new(bias, problem, [tiles.rows(), tiles.columns], parts);
        let bias_reads = match optional_inputs.half_of_bias_by_twos() {
            Some(half) if !problem.has_code() => BiasReads::Ahead(half),
            _ => BiasReads::There,
        };
        let kind = self.kind_of_score_gradient(bias_reads);
        let mask = self.mask_of_score_gradient(tiles);
        let bias_vector = bias_vector(optional_inputs.bias.as_ref());
        let gradient_vector = match shape[3].is_multiple_of(2) && !broadcast.queries {
            true => 2,
            false => 1,
        };
        let addresses = self.addresses_of_score_gradient(&mask, target);
        // SAFETY: the kernel reads the operands only inside their shapes: at rows below `q_len` or `kv_len` and at columns
        // below the head size. The kernel writes to `target` at queries below `q_len` and keys below `kv_len`. `target` has
        // room for `parts` partial gradients.
        unsafe {
            bias_gradient_split_m::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units() as u32),
                addresses,
                self.operands_of_score_gradient(),
                scoring(
                    problem,
                    offsets,
                    &mask,
                    optional_inputs.bias.clone(),
                    optional_inputs,
                ),
                tensor_arg(target),
                BiasGridLaunch::new(
                    grid,
                    problem.batch as u32,
                    problem.q_heads as u32,
                    problem.group() as u32,
                    key_tiles as u32,
                ),
                broadcast,
                tiles,
                kind,
                [
                    dtype_to_storage_type(problem.dtype),
                    optional_inputs.bias_element,
                    dtype_to_storage_type(target.dtype),
                ],
                joined_sizes([bias_vector, gradient_vector], tiles.vectors()),
            );
        }
    }
}
