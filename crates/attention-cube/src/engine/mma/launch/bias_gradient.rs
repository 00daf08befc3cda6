//! Launches the bias gradient on matrix units.

use crate::arguments::{grid, is_in_vectors, score_arguments};
use crate::engine::mma::backward::bias_gradient::bias_gradient_split_m;
use crate::engine::mma::plan::BiasGradientTiles;
use crate::fragment::FragmentKind;
use crate::fragment::launch::fragment_kind;
use crate::fragment::work_tile::TileKind;
use crate::math::side::Side;
use crate::passes::backward::BackwardPass;
use crate::passes::bias_gradient::scores::Broadcast;
use crate::passes::lengths::Places;
use crate::passes::mask_bits::launch::pack;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count};
use cubecl::prelude::CubeDim;

impl BackwardPass<'_> {
    /// Writes the gradient of `bias`, or `parts` parts of it one after the other, to `target`.
    pub(crate) fn bias_on_matrix_units(
        &self,
        bias: &CubeTensor,
        tiles: BiasGradientTiles,
        places: Places,
        parts: usize,
        target: &CubeTensor,
    ) {
        let (problem, inputs, extras) = (self.problem, &self.inputs, &self.extras);
        let client = self.rows.client.clone();
        let shape = bias.meta.shape();
        let key_tiles = shape[3].div_ceil(tiles.columns);
        let (cubes, grid) = grid(
            shape[2].div_ceil(tiles.rows()) * key_tiles,
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
        let kind = TileKind {
            fragment: FragmentKind {
                has_slope: false,
                ..fragment_kind(problem, Side::Queries)
            },
            heads: 1,
            split: false,
        };
        let mask = pack(
            inputs,
            problem,
            Side::Queries,
            Some(tiles.rows()),
            tiles.columns,
        );
        let bias_vector = match &extras.bias {
            Some(bias) if is_in_vectors(bias, 2) => 2,
            _ => 1,
        };
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
            .chain(extras.beside_mask()),
        );
        // SAFETY: copies and reads stay inside the operands' shapes, and writes inside the target's parts.
        unsafe {
            bias_gradient_split_m::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units() as u32),
                addresses,
                Self::arg(&inputs.query),
                Self::arg(&inputs.key),
                Self::arg(&inputs.value),
                Self::arg(&self.output_gradient),
                Self::arg(&self.rows),
                mask.argument().into(),
                extras.bias().into(),
                extras.lengths_and_ids().into(),
                Self::arg(target),
                grid,
                places.extent(problem),
                score_arguments(problem),
                mask.places(),
                problem.batch as u32,
                problem.q_heads as u32,
                problem.group() as u32,
                key_tiles as u32,
                broadcast,
                tiles,
                kind,
                dtype_to_storage_type(problem.dtype),
                extras.bias_element,
                dtype_to_storage_type(target.dtype),
                bias_vector,
                gradient_vector,
                tiles.vectors(),
            );
        }
    }
}
