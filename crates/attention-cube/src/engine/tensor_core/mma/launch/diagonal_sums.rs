//! The launch of the sums of dS along diagonals on tensor cores.

use crate::auxiliary::lengths::BoundsOffsets;
use crate::auxiliary::table_gradient::diagonals::DISTANCES;
use crate::engine::backward_pass::BackwardPass;
use crate::engine::optional_inputs::bias_vector;
use crate::engine::table_gradient::plan::tile_diagonals;
use crate::engine::tensor_core::common::bias::BiasReads;
use crate::engine::tensor_core::common::launch::{joined_sizes, scoring};
use crate::engine::tensor_core::mma::backward::bias_gradient::BiasGridLaunch;
use crate::engine::tensor_core::mma::backward::bias_gradient::diagonals::diagonal_sums;
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use crate::kernel_args::{grid, tensor_arg};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{cube_count, empty};
use cubecl::prelude::CubeDim;

impl BackwardPass<'_> {
    /// Returns the sums of dS along the diagonals of score tiles.
    ///
    /// # Shapes
    /// The result is `[splits · batch, q_heads, tile diagonals, 128]`, f32.
    pub(crate) fn diagonal_sums(
        &self,
        tiles: BiasGradientTiles,
        splits: usize,
        offsets: BoundsOffsets,
    ) -> CubeTensor {
        let (problem, optional_inputs) = (self.problem, &self.optional_inputs);
        let client = self.rows.client.clone();
        let diagonals = tile_diagonals(problem, tiles.columns);
        let shape = [
            splits * problem.batch,
            problem.q_heads,
            diagonals,
            DISTANCES,
        ];
        let sums = empty(&self.rows, shape, DType::F32);
        let (cubes, grid) = grid(
            diagonals,
            splits,
            problem.q_heads,
            problem.batch,
            usize::MAX,
        );
        let kind = self.kind_of_score_gradient(BiasReads::There);
        let mask = self.mask_of_score_gradient(tiles);
        let addresses = self.addresses_of_score_gradient(&mask, &sums);
        // SAFETY: the kernel reads the operands only inside their shapes: at rows below `q_len` or `kv_len` and at columns
        // below the head size. Each CTA writes the 128 elements of its tile diagonal to `sums`.
        unsafe {
            diagonal_sums::launch_unchecked(
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
                tensor_arg(&sums),
                BiasGridLaunch::new(
                    grid,
                    problem.batch as u32,
                    problem.q_heads as u32,
                    problem.group() as u32,
                    problem.kv_len.div_ceil(tiles.columns) as u32,
                ),
                tiles,
                kind,
                [
                    dtype_to_storage_type(problem.dtype),
                    optional_inputs.bias_element,
                ],
                joined_sizes(
                    [bias_vector(optional_inputs.bias.as_ref())],
                    tiles.vectors(),
                ),
            );
        }
        sums
    }
}
