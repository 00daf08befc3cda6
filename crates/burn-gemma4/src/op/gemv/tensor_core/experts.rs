//! Launches the tensor-core kernels of MoE experts with quantized weights.

use super::super::launch_options::Shape;
use super::super::sums::ProjectPlan;
use super::super::{BATCH_MAX_ROWS, GEMV_MAX_ROWS};
use super::codes::Codes;
use super::expert_words::{MOST_PAIRS, PairPlaceLaunch, mix_pairs_pdl, project_expert_words_pdl};
use super::staged::{Staging, plan::plan_of_experts};
use super::word_rows::WordRowsLaunch;
use super::{WORDS_OF_VECTOR, has_product, is_served};
use crate::op::launch::vector_size;
use crate::quant::layout::Layout;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::{cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::hopper::multiprocessors;
use cube_kit::launch::{address_type, empty, exact_cube_count};
use cube_kit::nvidia::Half;
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;

/// The number of units in a cube that adds up experts' outputs.
const UNITS: usize = 256;

/// The smallest number of rows for which experts are multiplied on tensor cores.
const FIRST_ROWS: usize = 2;

/// The quantized matrices of all experts.
pub(in super::super) struct ExpertWords {
    /// The packed rows, `[experts · rows, words]`.
    pub words: CubeTensor,
    pub layout: Layout,
    /// The number of rows in an expert's matrix.
    pub rows: usize,
}

/// Computes GeGLU of each pair of a row and a chosen expert, `[pairs, rows of an expert / 2]`. The first half of an
/// expert's rows is the gate projection. Returns `None` if the kernel does not support the GEMM.
pub(in super::super) fn gate_expert_words(
    input: &CubeTensor,
    weight: &ExpertWords,
    chosen: &CubeTensor,
) -> Option<CubeTensor> {
    let top_k = chosen.meta.shape()[1];
    project(input, weight, chosen, top_k, true, input.dtype)
}

/// Multiplies the inner activations of each pair, `[pairs, inner]`, by the expert's down projection. Adds up the
/// results of a row's experts, weighted by `shares`. Returns `None` if the kernel does not support the GEMM.
pub(in super::super) fn mix_expert_words(
    input: &CubeTensor,
    weight: &ExpertWords,
    chosen: &CubeTensor,
    shares: &CubeTensor,
) -> Option<CubeTensor> {
    // Keep the outputs in f32, so that only their sum is rounded.
    let outputs = project(input, weight, chosen, 1, false, DType::F32)?;
    let client = input.client.clone();
    let [rows, top_k] = [chosen.meta.shape()[0], chosen.meta.shape()[1]];
    let columns = weight.rows;
    let shares = into_contiguous(shares.clone());
    let output = empty(input, [rows, columns], input.dtype);
    let vector = vector_size(&client, size_of::<f32>(), &[columns]);
    let vectors = columns / vector;
    let cubes = vectors.div_ceil(UNITS);
    // SAFETY: a unit reads and writes only vectors below `vectors` of its row. Each row has `top_k` rows of `outputs`
    // and as many elements of `shares`.
    unsafe {
        mix_pairs_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, rows * cubes),
            CubeDim::new_1d(UNITS as u32),
            address_type([&outputs, &output]),
            outputs.into_tensor_arg(),
            shares.into_tensor_arg(),
            output.clone().into_tensor_arg(),
            vectors as u32,
            cubes as u32,
            top_k,
            UNITS,
            supports_pdl(&client),
            dtype_to_storage_type(input.dtype),
            vector,
        );
    }
    Some(output)
}

/// Multiplies `input` by the transposes of the experts' matrices, for each pair of a row and a chosen expert.
/// `pairs_of_row` is the number of pairs that read the same input row.
fn project(
    input: &CubeTensor,
    weight: &ExpertWords,
    chosen: &CubeTensor,
    pairs_of_row: usize,
    gated: bool,
    dtype: DType,
) -> Option<CubeTensor> {
    let client = input.client.clone();
    let [rows, top_k] = [chosen.meta.shape()[0], chosen.meta.shape()[1]];
    let pairs = rows * top_k;
    let columns = input.meta.shape()[1];
    let outputs = weight.rows / if gated { 2 } else { 1 };
    let shape = Shape {
        rows: GEMV_MAX_ROWS,
        outputs,
        columns,
        gated,
        sides: 1,
    };
    let plan = plan_of(input, weight, rows, pairs, shape)?;
    assert_eq!(
        weight.layout.columns, columns,
        "matrix: expected as many columns as the input has"
    );
    let (input, chosen) = (
        into_contiguous(input.clone()),
        into_contiguous(chosen.clone()),
    );
    let output = empty(&input, [pairs, outputs], dtype);
    let experts = weight.words.meta.shape()[0] / weight.rows;
    let cubes = outputs.div_ceil(plan.outputs * plan.teams);
    let codes = Codes {
        bits: weight.layout.format.bits,
        half: Half::of(input.dtype).expect("the plan accepts only f16 and bf16"),
    };
    let staging = Staging::new(codes, columns);
    let stride = weight.words.meta.strides()[0];
    let elements = [input.dtype, dtype].map(dtype_to_storage_type);
    // SAFETY: the inner dimension is a multiple of half a stage. The codes, the scales and the input that a thread
    // reads therefore lie within their rows. The index of a weight row is clamped to the last row of the expert's
    // matrix. A pair is below `pairs`, and a thread writes only outputs below `outputs`.
    unsafe {
        project_expert_words_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, pairs.min(experts) * cubes),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            address_type([&input, &weight.words, &output]),
            input.into_tensor_arg(),
            weight.words.clone().into_tensor_arg(),
            WordRowsLaunch::new(
                stride as u32,
                weight.layout.scales() as u32,
                columns as u32,
                codes.mask(),
            ),
            chosen.into_tensor_arg(),
            PairPlaceLaunch::new(
                pairs as u32,
                pairs_of_row as u32,
                cubes as u32,
                weight.rows as u32,
                outputs as u32,
                (weight.rows - outputs) as u32,
            ),
            output.clone().into_tensor_arg(),
            staging,
            pairs.next_power_of_two(),
            pairs < experts,
            plan,
            elements,
        );
    }
    Some(output)
}

/// Returns the division of the GEMM among warps, or `None` if the kernel does not support the GEMM.
fn plan_of(
    input: &CubeTensor,
    weight: &ExpertWords,
    rows: usize,
    pairs: usize,
    shape: Shape,
) -> Option<ProjectPlan> {
    let client = &input.client;
    let strides = weight.words.meta.strides();
    let is_read = is_served(weight.layout)
        && !weight.words.meta.is_tiled()
        && strides[1] == 1
        && strides[0].is_multiple_of(WORDS_OF_VECTOR)
        && (FIRST_ROWS..=BATCH_MAX_ROWS).contains(&rows)
        && pairs <= MOST_PAIRS
        && has_product(client, Half::of(input.dtype)?);
    // At most as many experts are read as there are pairs.
    let experts = pairs.min(weight.words.meta.shape()[0] / weight.rows);
    let (multiprocessors, pdl) = (multiprocessors(client), supports_pdl(client));
    let bits = weight.layout.format.bits;
    is_read.then(|| plan_of_experts(experts, shape, bits, multiprocessors, pdl))?
}
