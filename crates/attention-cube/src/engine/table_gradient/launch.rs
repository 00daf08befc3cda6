//! Launches the kernels that compute the gradient of a score mod's table.

use crate::auxiliary::lengths::BoundsOffsets;
use crate::auxiliary::reduce::sum_parts;
#[cfg(feature = "cuda")]
use crate::auxiliary::table_gradient::diagonals::{self, DiagonalCountsLaunch};
use crate::auxiliary::table_gradient::scores::{self, TableCountsLaunch};
use crate::engine::backward_pass::BackwardPass;
use crate::engine::table_gradient::plan::{TableGradientPlan, TableTiles, score_tiles};
#[cfg(feature = "cuda")]
use crate::kernel_args::structure;
use crate::kernel_args::{head_sizes, tensor_arg};
use crate::tile_ops::tiles::UnitTiles;
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
    let elements = table.meta.shape().num_elements();
    let parts = plan.parts_for(elements);
    // The tensor has one dimension, because CubeCL may pad the rows of tensors with several dimensions, and then fills
    // only the rows with zeros.
    let partial = CubeBackend::float_zeros(
        Shape::new([parts * elements]),
        &pass.rows.device,
        FloatDType::F32,
    );
    let target = Partial {
        partial: &partial,
        elements,
        parts,
    };
    match plan.tiles {
        TableTiles::Units(tiles) => {
            pass.table_on_units(tiles, plan.tiles_per_cube, offsets, target);
        }
        #[cfg(feature = "cuda")]
        TableTiles::MatrixUnits { tiles, splits } => {
            let sums = pass.diagonal_sums(tiles, splits, offsets);
            pass.table_of_diagonals(&sums, splits, offsets, target);
        }
        #[cfg(not(feature = "cuda"))]
        TableTiles::MatrixUnits { .. } => {
            unreachable!("only engines of the feature `cuda` plan table gradients on matrix units")
        }
    }
    let vector = if elements.is_multiple_of(4) { 4 } else { 1 };
    sum_parts(&partial, 0, parts, table, None, vector)
}

/// The partial gradients of a table.
#[derive(Clone, Copy)]
struct Partial<'a> {
    /// The partial gradients one after another, in f32.
    partial: &'a CubeTensor,
    /// The number of elements of the table.
    elements: usize,
    /// The number of partial gradients.
    parts: usize,
}

impl BackwardPass<'_> {
    /// Writes the partial gradients, which scalar units compute from recomputed scores. If `tiles_per_cube` is given, a
    /// cube computes at most this number of score tiles per launch.
    fn table_on_units(
        &self,
        tiles: UnitTiles,
        tiles_per_cube: Option<usize>,
        offsets: BoundsOffsets,
        target: Partial<'_>,
    ) {
        let (problem, optional_inputs) = (self.problem, &self.optional_inputs);
        let Partial {
            partial,
            elements,
            parts,
        } = target;
        let client = self.rows.client.clone();
        let count = score_tiles(problem, &tiles);
        let of_launch = tiles_per_cube.map_or(count, |most| most * parts);
        for first_tile in (0..count).step_by(of_launch.max(1)) {
            let end_tile = count.min(first_tile + of_launch);
            // SAFETY: the kernel reads queries at rows below `q_len`, and keys and values at rows below `kv_len`. Cube
            // `i` writes only the elements `i · elements` to `(i + 1) · elements` of `partial`. Other cubes return at
            // once.
            unsafe {
                scores::table_gradient::launch_unchecked(
                    &client,
                    cube_count(&client, parts),
                    CubeDim::new_1d(tiles.units as u32),
                    self.addresses(&[partial]),
                    self.operands(),
                    optional_inputs.scoring(offsets, problem),
                    tensor_arg(partial),
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
                    self.kind(tiles),
                    [
                        dtype_to_storage_type(problem.dtype),
                        optional_inputs.mask_element,
                        optional_inputs.bias_element,
                    ],
                    tiles.vector,
                );
            }
        }
    }

    /// Writes the partial gradients from the sums of dS along diagonals.
    #[cfg(feature = "cuda")]
    fn table_of_diagonals(
        &self,
        sums: &CubeTensor,
        splits: usize,
        offsets: BoundsOffsets,
        target: Partial<'_>,
    ) {
        let (problem, optional_inputs) = (self.problem, &self.optional_inputs);
        let client = self.rows.client.clone();
        // SAFETY: the kernel reads `sums` inside its shape. Cube `i` writes only the elements `i · elements` to
        // `(i + 1) · elements` of `partial`. Other cubes return at once.
        unsafe {
            diagonals::gradient_of_diagonals::launch_unchecked(
                &client,
                cube_count(&client, target.parts),
                CubeDim::new_1d(diagonals::UNITS as u32),
                self.addresses(&[target.partial, sums]),
                tensor_arg(sums),
                optional_inputs.scoring(offsets, problem),
                tensor_arg(target.partial),
                DiagonalCountsLaunch::new(
                    target.parts as u32,
                    target.elements as u32,
                    problem.batch as u32,
                    problem.q_heads as u32,
                    sums.meta.shape()[2] as u32,
                    splits as u32,
                ),
                structure(problem),
                problem.score_mod,
                [optional_inputs.mask_element, optional_inputs.bias_element],
            );
        }
    }
}
