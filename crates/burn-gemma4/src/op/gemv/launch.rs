//! Launches the GEMV kernels, with enough units to saturate the memory bandwidth.

use super::concat::weight_matrices;
use super::kernel::{WeightStridesLaunch, project_pdl};
use super::launch_options::{LaunchOptions, plan, tensor_of};
use super::sums::ProjectPlan;
use super::{GEMV_MAX_ROWS, GemvBackend, MaybeMatrix, ProductOptions, ProductTensors, quantized};
#[cfg(feature = "cuda")]
use super::{hopper, tensor_core};
use crate::op::launch::{rows_of, vector_size};
use crate::quant::layout::Layout;
use burn::backend::{
    cubecl::dtype_to_storage_type,
    ops::FloatTensorOps,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Slice};
use burn_cubecl::{
    CubeBackend, cubecl,
    kernel::{into_contiguous, untile},
    tensor::CubeTensor,
};
use cube_kit::launch::{address_type, empty, exact_cube_count};
use cube_kit::pdl::LOAD_BYTES;
use cubecl::{client::Client, prelude::CubeDim};
use std::ops::Range;

impl GemvBackend for CubeBackend {
    fn product(tensors: ProductTensors<Self>, options: ProductOptions) -> FloatTensor<Self> {
        multiply(tensors, options)
    }

    fn gate_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (weight, rows) = flat_matrices(weight);
        let options = LaunchOptions::gated_by_experts(weight.clone(), chosen, rows);
        launch(input, weight, options)
    }

    fn mix_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
        shares: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (weight, rows) = flat_matrices(weight);
        let options = LaunchOptions::mixed(chosen, shares, rows);
        launch(input, weight, options)
    }

    fn gate_experts_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        chosen: IntTensor<Self>,
        layout: Layout,
        rows: usize,
    ) -> FloatTensor<Self> {
        #[cfg(feature = "cuda")]
        {
            let words = words.clone();
            let weight = tensor_core::ExpertWords {
                words,
                layout,
                rows,
            };
            if let Some(output) = tensor_core::gate_expert_words(&input, &weight, &chosen) {
                return output;
            }
        }
        let options = LaunchOptions::gated_by_experts(words.clone(), chosen, rows);
        quantized::launch(input, words, layout, options)
    }

    fn mix_experts_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        chosen: IntTensor<Self>,
        shares: FloatTensor<Self>,
        layout: Layout,
        rows: usize,
    ) -> FloatTensor<Self> {
        #[cfg(feature = "cuda")]
        {
            let words = words.clone();
            let weight = tensor_core::ExpertWords {
                words,
                layout,
                rows,
            };
            if let Some(output) = tensor_core::mix_expert_words(&input, &weight, &chosen, &shares) {
                return output;
            }
        }
        let options = LaunchOptions::mixed(chosen, shares, rows);
        quantized::launch(input, words, layout, options)
    }
}

/// Reshapes `[matrices, rows, columns]` to `[matrices · rows, columns]`. Also returns the number of rows of one matrix.
/// Matrices with padded rows are not copied. Burn's own reshape would copy such matrices in every decode step.
fn flat_matrices(weight: CubeTensor) -> (CubeTensor, usize) {
    let weight = untile(weight);
    let [count, rows, _] = weight.meta.shape().dims();
    let strides = weight.meta.strides();
    let mut flat = match strides[2] == 1 && strides[0] == rows * strides[1] {
        true => weight,
        false => into_contiguous(weight),
    };
    flat.meta.remove(0);
    flat.meta.shape_mut()[0] = count * rows;
    (flat, rows)
}

pub(super) fn multiply(
    tensors: ProductTensors<CubeBackend>,
    options: ProductOptions,
) -> CubeTensor {
    let launched = LaunchOptions::of(&tensors, options);
    let first = tensor_of(&tensors.first).expect("a product has a matrix");
    #[cfg(feature = "cuda")]
    match options.layout {
        None => {
            if let Some(plan) = hopper::plan_of(&tensors.input, &first, &launched) {
                return hopper::multiply(tensors.input, first, launched, plan);
            }
            if let Some(plan) = tensor_core::plan_of_whole(&tensors.input, &first, &launched) {
                return tensor_core::multiply(tensors.input, first, launched, plan);
            }
        }
        Some(layout) => {
            let plan = tensor_core::plan_of_words(&tensors.input, &first, layout, &launched);
            if let Some(plan) = plan {
                return tensor_core::multiply_words(tensors.input, first, layout, launched, plan);
            }
        }
    }
    let rows = tensors.input.meta.shape()[0];
    if rows > GEMV_MAX_ROWS {
        // A chunk of `most_rows` rows may still have too many rows for this shape. The recursive call then divides the
        // chunk again.
        let of_device = most_rows(&tensors.input.client, tensors.input.dtype);
        let of_chunk = match rows > of_device {
            true => of_device,
            false => GEMV_MAX_ROWS,
        };
        let starts = (0..rows).step_by(of_chunk);
        let chunks = starts.map(|start| start..rows.min(start + of_chunk));
        let products = chunks.map(|chunk| multiply(rows_of_product(&tensors, chunk), options));
        return CubeBackend::float_cat(products.collect(), 0);
    }
    match options.layout {
        None => launch(tensors.input, first, launched),
        Some(layout) => quantized::launch(tensors.input, first, layout, launched),
    }
}

/// Returns the tensors of a GEMV that multiplies only a range of the input rows.
fn rows_of_product(
    tensors: &ProductTensors<CubeBackend>,
    rows: Range<usize>,
) -> ProductTensors<CubeBackend> {
    let part = |tensor: &CubeTensor| {
        let columns = tensor.meta.shape()[1];
        let slices = [Slice::from(rows.clone()), Slice::from(0..columns)];
        CubeBackend::float_slice(tensor.clone(), &slices)
    };
    ProductTensors {
        input: part(&tensors.input),
        first: tensors.first.clone(),
        second: tensors.second.clone(),
        third: tensors.third.clone(),
        through: match &tensors.through {
            MaybeMatrix::Absent => MaybeMatrix::Absent,
            MaybeMatrix::Whole(through) => MaybeMatrix::Whole(part(through)),
            MaybeMatrix::Words(_) => unreachable!("activations are not quantized"),
        },
    }
}

/// Returns the largest number of input rows for which a GEMV reads each weight only once.
pub(super) fn most_rows(client: &Client, dtype: DType) -> usize {
    #[cfg(feature = "cuda")]
    if tensor_core::serves_batches(client, dtype) {
        return super::BATCH_MAX_ROWS;
    }
    #[cfg(not(feature = "cuda"))]
    let _ = (client, dtype);
    GEMV_MAX_ROWS
}

/// Multiplies `input`, `[rows, columns in]`, by the transpose of `weight`, `[columns out, columns in]`.
fn launch(input: CubeTensor, weight: CubeTensor, mut options: LaunchOptions) -> CubeTensor {
    let client = input.client.clone();
    let reads_parameters = options.reads_parameters(&weight);
    let (input, weight) = (into_contiguous(input), rows_of(weight));
    let [rows, inner] = [input.meta.shape()[0], input.meta.shape()[1]];
    let items = options.items(rows, weight.meta.shape()[0]);
    let [second, third] = [&options.second, &options.third].map(|side| side.clone().map(rows_of));
    let stride = |tensor: &CubeTensor| tensor.meta.strides()[0];
    for matrix in [&weight].into_iter().chain(&second).chain(&third) {
        assert_eq!(
            matrix.meta.shape()[1],
            inner,
            "matrix: expected as many columns as the input has"
        );
    }
    let strides = [
        stride(&weight),
        second.as_ref().map_or(0, stride),
        third.as_ref().map_or(0, stride),
    ];
    let [of_first, of_second, of_third] = strides;
    let vector = vector_size(
        &client,
        input.dtype.size(),
        &[inner, of_first, of_second, of_third],
    );
    let vectors = inner / vector;
    let [of_first, of_second, of_third] = strides.map(|stride| (stride / vector) as u32);
    let output = empty(&input, [items.rows_out, items.outputs()], input.dtype);
    let plan = plan(&client, items, vectors, &options, IN_FLIGHT);
    let plan = ProjectPlan {
        // Read weights before the wait for the previous launch only if there is one input row. With several rows, the
        // sums fill the registers. The speed of early reads was not measured for that case.
        reads_ahead: plan.pdl
            && rows == 1
            && reads_parameters
            && vector * weight.dtype.size() == LOAD_BYTES,
        ..plan
    };
    let (factor, factor_place) = options.factor();
    let address_type = address_type(
        [&input, &weight, &output]
            .into_iter()
            .chain(&second)
            .chain(&third)
            .chain(&factor),
    );
    let element = dtype_to_storage_type(input.dtype);
    // SAFETY: each unit reads input rows of its work item, and weight rows up to the last row of its matrix. The
    // indices of chosen experts are below the number of experts. Each unit writes only elements of `output` that belong
    // to its own work item and matrix.
    unsafe {
        project_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, items.count * items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            address_type,
            input.into_tensor_arg(),
            weight_matrices(
                weight,
                [second, third],
                items.sides.launch(plan.cube_outputs()),
                CubeTensor::into_tensor_arg,
            ),
            WeightStridesLaunch::new(of_first, of_second, of_third),
            options.expert_inputs(items.place(plan, vectors)),
            options.epilogue_inputs(factor, factor_place),
            output.clone().into_tensor_arg(),
            (items.inner() * vectors) as u32,
            plan,
            options.epilogue(),
            element,
            vector,
        );
    }
    output
}

/// The number of weight vectors that a unit keeps in flight.
const IN_FLIGHT: usize = 8;
