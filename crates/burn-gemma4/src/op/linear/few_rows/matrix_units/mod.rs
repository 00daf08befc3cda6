//! Products of several rows on NVIDIA's matrix units, where ordinary ones would be busier than the memory. What they do not take (other dtypes,
//! inner dimensions that are no whole steps, experts) is left to the kernels that take all.

mod after_residual;
mod kernel;
mod parts;
mod plan;
mod words;

use super::{
    after_residual::{AfterResidual, Row},
    experts::Items,
    kernel::WeightStridesLaunch,
    launch::LaunchOptions,
    sums::ProjectPlan,
};
use crate::{
    op::{launch::plane_width, sums::Team},
    quantized::layout::{Layout, Rounding, Scales},
};
use after_residual::{RowPlan, project_after_residual_overlapped};
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::{
    ampere::copy::PIECE,
    hopper::{ASSUMED_MULTIPROCESSORS, Half},
    launch::{address_type, empty, exact_cube_count},
    overlap::overlaps,
};
use cubecl::{
    client::Client,
    ir::{FloatKind, features::MmaConfig},
    prelude::CubeDim,
};
use kernel::project_by_matrix_units_overlapped;
use plan::{AFTER_RESIDUAL, Shape, Tuning, WARP, WHOLE, WORDS};
use words::{Codes, WordRowsLaunch, project_words_by_matrix_units_overlapped};

/// Words of a row are a multiple of these, so that vectors of codes begin where reads may.
const WORDS_OF_VECTOR: usize = 4;

/// How [`multiply`] multiplies by whole weights, if it does.
pub(super) fn plan_of_whole(
    input: &CubeTensor,
    weight: &CubeTensor,
    options: &LaunchOptions,
) -> Option<ProjectPlan> {
    let is_half = weight.dtype == input.dtype && Half::of(input.dtype).is_some();
    let is_read = is_half && rows_are_of(PIECE, weight, options);
    is_read.then(|| planned(input, weight, options, WHOLE))?
}

/// How [`multiply_after_residual`] multiplies what it makes of a row, if it does.
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
    // Else a launch gives them another layout.
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

/// How [`multiply_words`] multiplies by such words, if it does.
pub(super) fn plan_of_words(
    input: &CubeTensor,
    words: &CubeTensor,
    layout: Layout,
    options: &LaunchOptions,
) -> Option<ProjectPlan> {
    let format = layout.format;
    let is_served = matches!(format.bits, 4 | 8)
        && format.group == Some(words::GROUP)
        && format.rounding == Rounding::None
        && format.scales
            == Scales::Half {
                zero: 1 << (format.bits - 1),
            };
    let is_read = is_served && rows_are_of(WORDS_OF_VECTOR, words, options);
    is_read.then(|| planned(input, words, options, WORDS))?
}

fn planned(
    input: &CubeTensor,
    first: &CubeTensor,
    options: &LaunchOptions,
    tuning: Tuning,
) -> Option<ProjectPlan> {
    let client = &input.client;
    if options.experts.is_some() || !has_product(client, Half::of(input.dtype)?) {
        return None;
    }
    let [rows, columns] = [input.meta.shape()[0], input.meta.shape()[1]];
    let shape = Shape {
        rows,
        outputs: options.items(rows, first.meta.shape()[0]).outputs(),
        columns,
        gated: options.gated,
        sides: options.sides(),
    };
    let plan = plan::plan(shape, tuning, multiprocessors(client), overlaps(client))?;
    Some(ProjectPlan {
        reads_ahead: plan.overlaps && tuning.reads_ahead && options.reads_parameters(first),
        ..plan
    })
}

fn multiprocessors(client: &Client) -> usize {
    let count = client.properties().hardware.num_streaming_multiprocessors;
    count.map_or(ASSUMED_MULTIPROCESSORS, |count| count as usize)
}

/// Whether the device has the product.
fn has_product(client: &Client, half: Half) -> bool {
    let element = match half {
        Half::F16 => FloatKind::F16,
        Half::Bf16 => FloatKind::BF16,
    };
    let product = MmaConfig {
        a_type: element.into(),
        b_type: element.into(),
        cd_type: FloatKind::F32.into(),
        m: 16,
        n: 8,
        k: 16,
    };
    plane_width(client) == WARP && client.properties().features.matmul.mma.contains(&product)
}

/// Whether the matrices' rows begin at multiples of so many elements, and lie together.
fn rows_are_of(elements: usize, first: &CubeTensor, options: &LaunchOptions) -> bool {
    let matrices = [Some(first), options.second.as_ref(), options.third.as_ref()];
    let is_of = |matrix: &CubeTensor| {
        let strides = matrix.meta.strides();
        !matrix.meta.is_tiled() && strides[1] == 1 && strides[0].is_multiple_of(elements)
    };
    matrices.into_iter().flatten().all(is_of)
}

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
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
    let half = Half::of(product.input.dtype).expect("planned for halves");
    let addresses = address_type(product.tensors(&weight, &options, &factor));
    let argument = |tensor: Option<CubeTensor>| tensor.map(CubeTensor::into_tensor_arg);
    // SAFETY: a lane reads pieces of the rows that the shapes have, whose steps are whole, and writes the outputs below those of its matrix.
    unsafe {
        project_by_matrix_units_overlapped::launch_unchecked(
            &client,
            exact_cube_count(&client, product.items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            addresses,
            product.input.into_tensor_arg(),
            weight.into_tensor_arg(),
            argument(options.second.take()).into(),
            argument(options.third.take()).into(),
            argument(factor).into(),
            product.output.clone().into_tensor_arg(),
            factor_place,
            product.items.sides.launch(plan),
            strides,
            columns as u32,
            options.cap.unwrap_or(1.0) as f32,
            plan,
            options.epilogue(),
            half,
            element,
        );
    }
    product.output
}

/// What the stream becomes, and its product with the transpose of `[columns out, columns in]`.
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
    let half = Half::of(product.input.dtype).expect("planned for halves");
    let addresses = address_type(product.tensors(&weight, &options, &factor));
    let argument = |tensor: Option<CubeTensor>| tensor.map(CubeTensor::into_tensor_arg);
    let row_plan = RowPlan {
        team: Team {
            units: plan.team.units * plan.teams,
            width: WARP,
        },
        vectors: columns / PIECE,
    };
    // SAFETY: a unit reads and writes vectors of the row that the shapes have; the rest is as in `multiply`.
    unsafe {
        project_after_residual_overlapped::launch_unchecked(
            &client,
            exact_cube_count(&client, product.items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            addresses,
            product.input.into_tensor_arg(),
            into_contiguous(row.added).into_tensor_arg(),
            row.weight.into_tensor_arg(),
            argument(row.scalar).into(),
            argument(row.next_weight).into(),
            stream.clone().into_tensor_arg(),
            weight.into_tensor_arg(),
            argument(options.second.take()).into(),
            argument(options.third.take()).into(),
            argument(factor).into(),
            product.output.clone().into_tensor_arg(),
            factor_place,
            product.items.sides.launch(plan),
            strides,
            columns as f32,
            row.epsilon as f32,
            options.cap.unwrap_or(1.0) as f32,
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

/// Of the matrices' rows, in pieces.
fn strides(weight: &CubeTensor, options: &LaunchOptions, columns: usize) -> WeightStridesLaunch {
    let stride = |matrix: &CubeTensor| {
        assert_eq!(
            matrix.meta.shape()[1],
            columns,
            "as many columns as the rows"
        );
        (matrix.meta.strides()[0] / PIECE) as u32
    };
    WeightStridesLaunch::new(
        stride(weight),
        options.second.as_ref().map_or(0, stride),
        options.third.as_ref().map_or(0, stride),
    )
}

/// `[rows, columns in]` times the transpose of the rows of `words`; other matrices of the options are words of the same layout.
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
    assert_eq!(layout.columns, columns, "as many columns as the rows");
    let stride = words.meta.strides()[0];
    for matrix in options.second.iter().chain(&options.third) {
        assert_eq!(matrix.meta.strides()[0], stride, "rows of one layout");
    }
    let word_rows = WordRowsLaunch::new(stride as u32, layout.scales() as u32, columns as u32);
    let (factor, factor_place) = options.factor();
    let element = dtype_to_storage_type(product.input.dtype);
    let codes = Codes {
        bits: layout.format.bits,
        half: Half::of(product.input.dtype).expect("planned for halves"),
    };
    let addresses = address_type(product.tensors(&words, &options, &factor));
    let argument = |tensor: Option<CubeTensor>| tensor.map(CubeTensor::into_tensor_arg);
    // SAFETY: a lane reads codes and scales of the rows that the shapes have, where the layout has them, in whole blocks, and writes the outputs
    // below those of its matrix.
    unsafe {
        project_words_by_matrix_units_overlapped::launch_unchecked(
            &client,
            exact_cube_count(&client, product.items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            addresses,
            product.input.into_tensor_arg(),
            words.into_tensor_arg(),
            argument(options.second.take()).into(),
            argument(options.third.take()).into(),
            argument(factor).into(),
            product.output.clone().into_tensor_arg(),
            factor_place,
            product.items.sides.launch(plan),
            word_rows,
            options.cap.unwrap_or(1.0) as f32,
            codes,
            plan,
            options.epilogue(),
            element,
            codes.words(),
        );
    }
    product.output
}

/// What both launches begin with.
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
}
