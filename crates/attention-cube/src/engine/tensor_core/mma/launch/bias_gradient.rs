//! The launch of the bias gradient on tensor cores.

use crate::auxiliary::lengths::BoundsOffsets;
use crate::auxiliary::mask_bits::launch::pack;
use crate::auxiliary::mask_bits::plan::MaskTile;
use crate::engine::backward_pass::BackwardPass;
use crate::engine::bias_gradient::launch::BiasGrid;
use crate::engine::optional_inputs::bias_vector;
use crate::engine::tensor_core::common::FragmentKind;
use crate::engine::tensor_core::common::bias::BiasReads;
use crate::engine::tensor_core::common::launch::fragment_kind;
use crate::engine::tensor_core::common::launch::{joined_sizes, scoring};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::backward::bias_gradient::bias_gradient_split_m;
use crate::engine::tensor_core::mma::backward::bias_gradient::{
    BiasGradientOperandsLaunch, BiasGridLaunch,
};
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use crate::kernel_args::tensor_arg;
use crate::math::side::Side;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count};
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
        let (problem, inputs, optional_inputs) =
            (self.problem, &self.inputs, &self.optional_inputs);
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
        let kind = TileKind {
            fragment: FragmentKind {
                has_slope: false,
                bias_reads,
                ..fragment_kind(problem, Side::Queries)
            },
            heads: 1,
            split: false,
            page_len: 0,
        };
        let mask = pack(
            inputs,
            problem,
            Side::Queries,
            MaskTile::Rows(tiles.rows()),
            tiles.columns,
        );
        let bias_vector = bias_vector(optional_inputs.bias.as_ref());
        let gradient_vector = match shape[3].is_multiple_of(2) && !broadcast.queries {
            true => 2,
            false => 1,
        };
        let addresses = address_type(
            [
                &inputs.query,
                &inputs.key,
                &inputs.value,
                &self.output_gradient,
                &self.rows,
                target,
            ]
            .into_iter()
            .chain(&mask.bits)
            .chain(optional_inputs.beside_mask()),
        );
        // SAFETY: the kernel reads the operands only inside their shapes: at rows below `q_len` or `kv_len` and at columns
        // below the head size. The kernel writes to `target` at queries below `q_len` and keys below `kv_len`. `target` has
        // room for `parts` partial gradients.
        unsafe {
            bias_gradient_split_m::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units() as u32),
                addresses,
                BiasGradientOperandsLaunch::new(
                    tensor_arg(&inputs.query),
                    tensor_arg(&inputs.key),
                    tensor_arg(&inputs.value),
                    tensor_arg(&self.output_gradient),
                    tensor_arg(&self.rows),
                ),
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
