//! GEMVs on NVIDIA's tensor cores. Most of these GEMVs have several input rows, and would be compute-bound on CUDA
//! cores. The portable kernels compute GEMVs that tensor cores do not support: other dtypes, MoE experts in floats or
//! of a single row, and some inner dimensions.

mod batch;
mod codes;
mod expert_words;
mod experts;
mod fused_residual;
mod kernel;
mod parts;
pub(super) mod per_layer;
mod plan;
mod staged;
mod word_rows;
mod words;

use super::{
    GEMV_MAX_ROWS,
    concat::{WeightMatricesLaunch, weight_matrices},
    experts::Items,
    kernel::WeightStridesLaunch,
    launch_options::{LaunchOptions, Shape},
    residual_row::{AfterResidual, Row},
    sums::ProjectPlan,
};
use crate::op::launch::plane_width;
use crate::op::sums::Team;
use crate::quant::layout::{Layout, Rounding, Scales};
use batch::project_batch_by_matrix_units_pdl;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use codes::Codes;
use cube_kit::ampere::{self, cp_async::PIECE};
use cube_kit::hopper::multiprocessors;
use cube_kit::launch::{address_type, empty, exact_cube_count};
use cube_kit::nvidia::Half;
use cube_kit::pdl::supports_pdl;
use cubecl::{
    client::Client,
    prelude::{CubeDim, CubePrimitive, OwnedTensor},
};
pub(super) use experts::{ExpertWords, gate_expert_words, mix_expert_words};
use fused_residual::{ResidualInputsLaunch, RowPlan, project_after_residual_pdl};
use kernel::project_by_matrix_units_pdl;
use plan::{AFTER_RESIDUAL, Tuning, WARP, WHOLE, WHOLE_BATCHES};
use staged::Staging;
use word_rows::WordRowsLaunch;
use words::project_words_by_matrix_units_pdl;

/// The row stride of a quantized matrix, in words, must be a multiple of this number, so that vectors of codes are
/// aligned.
const WORDS_OF_VECTOR: usize = 4;

/// Returns the plan of a GEMV with float weights for [`multiply`], or `None` if [`multiply`] does not support this
/// GEMV.
pub(super) fn plan_of_whole(
    input: &CubeTensor,
    weight: &CubeTensor,
    options: &LaunchOptions,
) -> Option<ProjectPlan> {
    let is_half = weight.dtype == input.dtype && Half::of(input.dtype).is_some();
    let is_read = is_half && rows_are_of(PIECE, weight, options);
    let tunings = std::iter::once(WHOLE).chain(WHOLE_BATCHES);
    is_read.then(|| {
        let plan_of = |tuning: Tuning| {
            planned(input, weight, options, |shape, multiprocessors, pdl| {
                let plan = plan::plan(shape, tuning, multiprocessors, pdl)?;
                Some(ProjectPlan {
                    reads_ahead: plan.pdl && tuning.reads_ahead,
                    ..plan
                })
            })
        };
        tunings.into_iter().find_map(plan_of)
    })?
}

/// Returns the plan of a GEMV for [`multiply_after_residual`]. Returns `None` if that function does not support the
/// GEMV, or if two separate launches are faster.
pub(super) fn plan_after_residual(
    row: &Row,
    weight: &CubeTensor,
    options: &LaunchOptions,
) -> Option<ProjectPlan> {
    let plan = plan_of_whole(&row.stream, weight, options)?;
    let cubes = options.items(plan.rows, weight.meta.shape()[0]).cubes(plan);
    let parameters = [
        Some(&row.weight),
        row.scalar.as_ref(),
        row.next_weight.as_ref(),
    ];
    // Require contiguous parameters of the stream's dtype. Other parameters would need an extra launch for a copy or a
    // cast.
    let stay = |parameter: &CubeTensor| {
        parameter.dtype == row.stream.dtype
            && !parameter.meta.is_tiled()
            && parameter.meta.strides().last() == Some(&1)
    };
    let is_served = plan.rows == 1
        && cubes <= AFTER_RESIDUAL * multiprocessors(&row.stream.client)
        && parameters.into_iter().flatten().all(stay);
    is_served.then_some(plan)
}

/// Returns the plan of a GEMV with quantized weights for [`multiply_words`], or `None` if the GEMV is not supported.
pub(super) fn plan_of_words(
    input: &CubeTensor,
    words: &CubeTensor,
    layout: Layout,
    options: &LaunchOptions,
) -> Option<ProjectPlan> {
    let is_read = is_served(layout) && rows_are_of(WORDS_OF_VECTOR, words, options);
    is_read.then(|| {
        planned(input, words, options, |shape, multiprocessors, pdl| {
            staged::plan::plan(shape, layout.format.bits, multiprocessors, pdl)
        })
    })?
}

/// True if the kernels of quantized weights support the layout: Q4_0 and Q8_0.
fn is_served(layout: Layout) -> bool {
    let format = layout.format;
    matches!(format.bits, 4 | 8)
        && format.group == Some(codes::GROUP)
        && format.rounding == Rounding::None
        && format.scales
            == Scales::Half {
                zero: 1 << (format.bits - 1),
            }
}

/// True if the device's tensor cores can multiply batches in `dtype`. A batch is 9 to
/// [`BATCH_MAX_ROWS`](super::BATCH_MAX_ROWS) input rows.
pub(super) fn serves_batches(client: &Client, dtype: DType) -> bool {
    Half::of(dtype).is_some_and(|half| has_product(client, half))
}

/// Returns the plan that `plan` makes of the shape, the number of multiprocessors, and whether the device supports PDL.
/// The plan reads ahead only if no launch writes the matrices. Returns `None` without tensor cores, or with experts.
fn planned(
    input: &CubeTensor,
    first: &CubeTensor,
    options: &LaunchOptions,
    plan: impl FnOnce(Shape, usize, bool) -> Option<ProjectPlan>,
) -> Option<ProjectPlan> {
    let client = &input.client;
    if options.experts.is_some() || !has_product(client, Half::of(input.dtype)?) {
        return None;
    }
    let shape = options.shape(input, first);
    let plan = plan(shape, multiprocessors(client), supports_pdl(client))?;
    Some(ProjectPlan {
        reads_ahead: plan.reads_ahead && options.reads_parameters(first),
        ..plan
    })
}

/// True if the device has plane operations for warps, and tensor cores for this dtype.
fn has_product(client: &Client, half: Half) -> bool {
    plane_width(client) == WARP && ampere::has_product(client, half)
}

/// True if the elements of each row are contiguous in all matrices, and the row strides are multiples of `elements`.
fn rows_are_of(elements: usize, first: &CubeTensor, options: &LaunchOptions) -> bool {
    let matrices = [Some(first), options.second.as_ref(), options.third.as_ref()];
    let is_of = |matrix: &CubeTensor| {
        let strides = matrix.meta.strides();
        !matrix.meta.is_tiled() && strides[1] == 1 && strides[0].is_multiple_of(elements)
    };
    matrices.into_iter().flatten().all(is_of)
}

/// Multiplies `input`, `[rows, columns in]`, by the transpose of `weight`, `[columns out, columns in]`.
pub(super) fn multiply(
    input: CubeTensor,
    weight: CubeTensor,
    mut options: LaunchOptions,
    plan: ProjectPlan,
) -> CubeTensor {
    let product = Product::new(input, &weight, &options);
    let client = product.input.client.clone();
    let columns = product.input.meta.shape()[1];
    let strides = strides(&weight, &options, columns);
    let (factor, factor_place) = options.factor();
    let element = dtype_to_storage_type(product.input.dtype);
    let half = Half::of(product.input.dtype).expect("the plan accepts only f16 and bf16");
    let addresses = address_type(product.tensors(&weight, &options, &factor));
    macro_rules! launch {
        ($kernel:ident) => {{
            let matrices = product.matrices(weight, &mut options, plan);
            // SAFETY: the inner dimension is a multiple of the columns that a warp multiplies at once. A thread's
            // 16-byte loads therefore lie within the rows of `input` and of the matrices. The index of a weight row is
            // clamped to the matrix's last row. A thread writes only elements of `output` that belong to its own
            // matrix.
            unsafe {
                $kernel::launch_unchecked(
                    &client,
                    exact_cube_count(&client, product.items.cubes(plan)),
                    CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
                    addresses,
                    product.input.into_tensor_arg(),
                    matrices,
                    strides,
                    options.epilogue_inputs(factor, factor_place),
                    product.output.clone().into_tensor_arg(),
                    columns as u32,
                    plan,
                    options.epilogue(),
                    half,
                    element,
                );
            }
        }};
    }
    match plan.rows > GEMV_MAX_ROWS {
        true => launch!(project_batch_by_matrix_units_pdl),
        false => launch!(project_by_matrix_units_pdl),
    }
    product.output
}

/// Adds the block's output to the residual stream, and multiplies the sum, or its norm, by the transpose of `weight`,
/// `[columns out, columns in]`.
pub(super) fn multiply_after_residual(
    row: Row,
    weight: CubeTensor,
    mut options: LaunchOptions,
    plan: ProjectPlan,
) -> AfterResidual<CubeBackend> {
    let product = Product::new(row.stream, &weight, &options);
    let client = product.input.client.clone();
    let columns = product.input.meta.shape()[1];
    let stream = empty(&product.input, [1, columns], product.input.dtype);
    let strides = strides(&weight, &options, columns);
    let (factor, factor_place) = options.factor();
    let element = dtype_to_storage_type(product.input.dtype);
    let half = Half::of(product.input.dtype).expect("the plan accepts only f16 and bf16");
    let addresses = address_type(product.tensors(&weight, &options, &factor));
    let matrices = product.matrices(weight, &mut options, plan);
    let argument = |tensor: Option<CubeTensor>| tensor.map(CubeTensor::into_tensor_arg);
    let row_plan = RowPlan {
        team: Team {
            units: plan.team.units * plan.teams,
            width: WARP,
        },
        vectors: columns / PIECE,
    };
    // SAFETY: a thread accesses only vectors below `vectors`. The stream, the block's output and each norm weight have
    // `vectors` vectors. For the weights and `output`, see `multiply`.
    unsafe {
        project_after_residual_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, product.items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            addresses,
            ResidualInputsLaunch::new(
                product.input.into_tensor_arg(),
                into_contiguous(row.added).into_tensor_arg(),
                row.weight.into_tensor_arg(),
                argument(row.scalar).into(),
                argument(row.next_weight).into(),
                columns as f32,
                row.epsilon as f32,
            ),
            stream.clone().into_tensor_arg(),
            matrices,
            strides,
            options.epilogue_inputs(factor, factor_place),
            product.output.clone().into_tensor_arg(),
            row_plan,
            plan,
            options.epilogue(),
            half,
            element,
            PIECE,
        );
    }
    AfterResidual {
        stream,
        product: product.output,
    }
}

/// Returns the strides of the matrices' rows, in pieces of 16 bytes.
fn strides(weight: &CubeTensor, options: &LaunchOptions, columns: usize) -> WeightStridesLaunch {
    let stride = |matrix: &CubeTensor| {
        assert_eq!(
            matrix.meta.shape()[1],
            columns,
            "matrix: expected as many columns as the input has"
        );
        (matrix.meta.strides()[0] / PIECE) as u32
    };
    WeightStridesLaunch::new(
        stride(weight),
        options.second.as_ref().map_or(0, stride),
        options.third.as_ref().map_or(0, stride),
    )
}

/// Multiplies `input`, `[rows, columns in]`, by the transposes of quantized matrices. `words` holds the rows of the
/// first matrix, and `options` holds the other matrices. All matrices must have the same layout.
pub(super) fn multiply_words(
    input: CubeTensor,
    words: CubeTensor,
    layout: Layout,
    mut options: LaunchOptions,
    plan: ProjectPlan,
) -> CubeTensor {
    let product = Product::new(input, &words, &options);
    let client = product.input.client.clone();
    let columns = product.input.meta.shape()[1];
    assert_eq!(
        layout.columns, columns,
        "matrix: expected as many columns as the input has"
    );
    let stride = words.meta.strides()[0];
    for matrix in options.second.iter().chain(&options.third) {
        assert_eq!(
            matrix.meta.strides()[0],
            stride,
            "matrices: expected rows of the same stride"
        );
    }
    let codes = Codes {
        bits: layout.format.bits,
        half: Half::of(product.input.dtype).expect("the plan accepts only f16 and bf16"),
    };
    let word_rows = WordRowsLaunch::new(
        stride as u32,
        layout.scales() as u32,
        columns as u32,
        codes.mask(),
    );
    let (factor, factor_place) = options.factor();
    let element = dtype_to_storage_type(product.input.dtype);
    let addresses = address_type(product.tensors(&words, &options, &factor));
    let staging = Staging::new(codes, columns);
    let matrices = product.matrices(words, &mut options, plan);
    // SAFETY: the inner dimension is a multiple of half a stage. The codes and scales that a thread copies therefore
    // lie within the rows of `words`, and a thread copies only the half that exists. The index of a weight row is
    // clamped to the matrix's last row. A thread writes only elements of `output` that belong to its own matrix.
    unsafe {
        project_words_by_matrix_units_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, product.items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            addresses,
            product.input.into_tensor_arg(),
            matrices,
            word_rows,
            options.epilogue_inputs(factor, factor_place),
            product.output.clone().into_tensor_arg(),
            staging,
            plan,
            options.epilogue(),
            element,
        );
    }
    product.output
}

/// The input, the output and the work items. The launches of all tensor-core kernels need these values.
struct Product {
    input: CubeTensor,
    items: Items,
    output: CubeTensor,
}

impl Product {
    fn new(input: CubeTensor, first: &CubeTensor, options: &LaunchOptions) -> Self {
        let input = into_contiguous(input);
        let items = options.items(input.meta.shape()[0], first.meta.shape()[0]);
        let output = empty(&input, [items.rows_out, items.outputs()], input.dtype);
        Self {
            input,
            items,
            output,
        }
    }

    fn tensors<'a>(
        &'a self,
        first: &'a CubeTensor,
        options: &'a LaunchOptions,
        factor: &'a Option<CubeTensor>,
    ) -> impl Iterator<Item = &'a CubeTensor> {
        let others = options.second.iter().chain(&options.third).chain(factor);
        [&self.input, first, &self.output].into_iter().chain(others)
    }

    /// Returns the matrices as a kernel argument, and removes the second and the third matrix from the options.
    fn matrices<T: CubePrimitive>(
        &self,
        first: CubeTensor,
        options: &mut LaunchOptions,
        plan: ProjectPlan,
    ) -> WeightMatricesLaunch<OwnedTensor<T>> {
        weight_matrices(
            first,
            [options.second.take(), options.third.take()],
            self.items.sides.launch(plan.cube_outputs()),
            CubeTensor::into_tensor_arg,
        )
    }
}
