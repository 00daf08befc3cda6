//! Launches the kernels that compute the gradient of a score mod's table.

use crate::auxiliary::lengths::BoundsOffsets;
use crate::auxiliary::reduce::sum_parts;
use crate::auxiliary::table_gradient::{self, TableCountsLaunch};
use crate::engine::backward_pass::BackwardPass;
use crate::engine::table_gradient::plan::{TableGradientPlan, score_tiles};
use crate::kernel_args::{head_sizes, tensor_arg};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{FloatDType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::cube_count;
use cubecl::prelude::CubeDim;

/// Computes the gradient of `table`. `offsets` locates the sequence lengths and segment bounds in the buffer that packs
/// them.
///
/// # Shapes
/// `table [n]` in f32, and the gradient has the same shape and dtype.
pub(crate) fn table_gradient(
    pass: &BackwardPass<'_>,
    table: &CubeTensor,
    plan: TableGradientPlan,
    offsets: BoundsOffsets,
) -> CubeTensor {
    let (problem, optional_inputs) = (pass.problem, &pass.optional_inputs);
    let tiles = plan.tiles;
    let elements = table.meta.shape().num_elements();
    let parts = plan.parts_for(elements);
    // The tensor has one dimension, because CubeCL may pad the rows of tensors with several dimensions, and then fills
    // only the rows with zeros.
    let partial = CubeBackend::float_zeros(
        Shape::new([parts * elements]),
        &pass.rows.device,
        FloatDType::F32,
    );
    let client = pass.rows.client.clone();
    let count = score_tiles(problem, &tiles);
    let of_launch = plan.tiles_per_cube.map_or(count, |most| most * parts);
    for first_tile in (0..count).step_by(of_launch.max(1)) {
        let end_tile = count.min(first_tile + of_launch);
        // SAFETY: the kernel reads queries at rows below `q_len`, and keys and values at rows below `kv_len`. Cube `i`
        // writes only the elements `i · elements` to `(i + 1) · elements` of `partial`. Other cubes return at once.
        unsafe {
            table_gradient::table_gradient::launch_unchecked(
                &client,
                cube_count(&client, parts),
                CubeDim::new_1d(tiles.units as u32),
                pass.addresses(&[&partial]),
                pass.operands(),
                optional_inputs.scoring(offsets, problem),
                tensor_arg(&partial),
                TableCountsLaunch::new(
                    parts as u32,
                    elements as u32,
                    problem.q_heads as u32,
                    problem.q_len.div_ceil(tiles.rows) as u32,
                    problem.kv_len.div_ceil(tiles.columns()) as u32,
                    first_tile as u32,
                    end_tile as u32,
                ),
                head_sizes(problem),
                pass.kind(tiles),
                [
                    dtype_to_storage_type(problem.dtype),
                    optional_inputs.mask_element,
                    optional_inputs.bias_element,
                ],
                tiles.vector,
            );
        }
    }
    let vector = if elements.is_multiple_of(4) { 4 } else { 1 };
    sum_parts(&partial, 0, parts, table, None, vector)
}
