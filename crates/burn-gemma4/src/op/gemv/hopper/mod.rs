//! GEMMs of a batch of input rows on Hopper, by `wgmma` and TMA. See [`kernel`] for the algorithm.

mod finish;
mod kernel;
mod plan;

use super::BATCH_MAX_ROWS;
use super::launch_options::LaunchOptions;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::hopper::tma::boxes;
use cube_kit::hopper::{PRODUCT_ROWS, is_hopper, multiprocessors};
use cube_kit::launch::{address_type, empty, exact_cube_count};
use cube_kit::nvidia::{Half, SUBTILE};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::*;
use kernel::project_batch_by_wgmma_pdl;
use plan::{BatchPlan, UNITS, WIDTH};

/// The alignment that TMA requires of row strides, in elements of 2 bytes. The input is contiguous, so its number of
/// columns must have this alignment too.
const ALIGNMENT: usize = 8;

/// Returns the plan of a GEMM with float weights for [`multiply`], or `None` if [`multiply`] does not support this
/// GEMM.
pub(super) fn plan_of(
    input: &CubeTensor,
    weight: &CubeTensor,
    options: &LaunchOptions,
) -> Option<BatchPlan> {
    let client = &input.client;
    let [rows, columns] = [input.meta.shape()[0], input.meta.shape()[1]];
    let half = Half::of(input.dtype)?;
    let is_batch = (1..=BATCH_MAX_ROWS).contains(&rows);
    if !is_batch || !is_hopper(client) || options.experts.is_some() {
        return None;
    }
    let items = options.items(rows, weight.meta.shape()[0]);
    let matrices = [
        Some(weight),
        options.second.as_ref(),
        options.third.as_ref(),
    ];
    let is_read = |matrix: &CubeTensor| {
        let (shape, strides) = (matrix.meta.shape(), matrix.meta.strides());
        matrix.dtype == input.dtype
            && !matrix.meta.is_tiled()
            && strides[1] == 1
            && strides[0] >= columns
            && strides[0].is_multiple_of(ALIGNMENT)
            && shape[1] == columns
    };
    let is_served = columns > 0
        && columns.is_multiple_of(ALIGNMENT)
        && items.outputs() > 0
        && items.sides.are_multiples_of(WIDTH)
        && matrices.into_iter().flatten().all(is_read);
    if !is_served {
        return None;
    }
    let shape = options.shape(input, weight);
    let plan = BatchPlan::new(shape, half, multiprocessors(client), supports_pdl(client));
    Some(BatchPlan {
        reads_ahead: plan.pdl && options.reads_parameters(weight),
        ..plan
    })
}

/// Multiplies `input`, `[rows, columns in]`, by the transpose of `weight`, `[columns out, columns in]`.
pub(super) fn multiply(
    input: CubeTensor,
    weight: CubeTensor,
    mut options: LaunchOptions,
    plan: BatchPlan,
) -> CubeTensor {
    let client = input.client.clone();
    let input = into_contiguous(input);
    let [rows, columns] = [input.meta.shape()[0], input.meta.shape()[1]];
    let items = options.items(rows, weight.meta.shape()[0]);
    let output = empty(&input, [rows, items.outputs()], input.dtype);
    let (factor, factor_place) = options.factor();
    let element = dtype_to_storage_type(input.dtype);
    let weight_rows = match plan.gated {
        true => PRODUCT_ROWS,
        false => plan.outputs(),
    };
    let map = |matrix: &CubeTensor, stride: usize, box_rows: usize| {
        let rows = matrix.meta.shape()[0];
        boxes(
            matrix,
            vec![1, 1, rows, columns],
            vec![rows * stride, rows * stride, stride, 1],
            vec![1, 1, box_rows, SUBTILE],
        )
    };
    let of_matrix = |matrix: Option<&CubeTensor>| {
        let matrix = matrix.unwrap_or(&weight);
        map(matrix, matrix.meta.strides()[0], weight_rows)
    };
    let addresses = address_type([&output].into_iter().chain(&factor));
    // SAFETY: TMA reads only elements inside its tensor maps, which have the shapes of the input and of the matrices. A
    // thread writes only elements of `output` whose row is below `rows` and whose column belongs to the matrix of the
    // thread's cube.
    unsafe {
        project_batch_by_wgmma_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, items.sides.cubes(plan.outputs()) * plan.parts),
            CubeDim::new_1d(UNITS as u32),
            addresses,
            // Pass `columns` as the row stride of the input, because a contiguous matrix of one row may have any row
            // stride in its metadata.
            map(&input, columns, plan.tokens),
            of_matrix(None),
            of_matrix(options.second.as_ref()),
            of_matrix(options.third.as_ref()),
            items.sides.launch(plan.outputs()),
            options.epilogue_inputs(factor, factor_place),
            output.clone().into_tensor_arg(),
            rows as u32,
            columns.div_ceil(BatchPlan::DEPTH) as u32,
            plan,
            options.epilogue(),
            element,
            plan.mainloop().sums(),
        );
    }
    output
}
