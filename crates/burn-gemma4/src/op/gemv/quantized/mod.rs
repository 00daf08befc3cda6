//! GEMVs with quantized weights.

mod kernel;

use super::{
    concat::weight_matrices,
    launch_options::{LaunchOptions, are_filled, plan},
    sums::ProjectPlan,
};
use crate::op::dequantize::row_parts;
use crate::op::launch::{converts_f16, plane_width, rows_of, vector_size};
use crate::quant::layout::{Format, Layout};
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, empty, exact_cube_count};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;
use kernel::{WordMatrixLaunch, WordsFormat, project_words_pdl};

/// The largest number of columns in a vector of codes. The inputs that two adjacent units read are one vector of codes
/// apart. With twice as many columns per vector, the loads of inputs would touch twice as many cache lines. The cache
/// would then be the bottleneck.
const VECTOR_COLUMNS: usize = 16;
/// The largest number of vectors that a unit keeps in flight. With 32 vectors, decoding was slower: see the last
/// measurement in [`words_in_flight`].
const VECTORS_IN_FLIGHT: usize = 16;

/// Returns the number of words that a unit should keep in flight.
///
/// Decode speeds of one row on an H200, in tokens/s:
/// - E2B in Q4_0: 622 with 8 words, 677 with 16 and 676 with 32.
/// - E4B in Q4_0: 376 with 16 words, and 413 with 32.
/// - E2B in Q8_0: 588 with 16 words, and 576 with 32.
/// - 12B in Q8_0: 187 with 16 words, and 189 with 32.
/// - 12B in Q4_0: 211 with 16 words and 193 with 32, when a vector of codes of this model had one word. With vectors of
///   two words and at most [`VECTORS_IN_FLIGHT`] of them, 217 (2026-11-30; 205 before on that card).
///
/// The other formats were not measured.
fn words_in_flight(rows: usize, format: Format, pdl: bool) -> usize {
    match rows == 1 && format.top_bits() == 0 && pdl {
        true => 32,
        false => 16,
    }
}

/// Multiplies `input`, `[rows, columns in]`, by the transposes of quantized matrices. `words` holds the rows of the
/// first matrix, and `options` holds the other matrices. All matrices must have the same layout.
pub(super) fn launch(
    input: CubeTensor,
    words: CubeTensor,
    layout: Layout,
    mut options: LaunchOptions,
) -> CubeTensor {
    let client = input.client.clone();
    let reads_parameters = options.reads_parameters(&words);
    let (input, words) = (into_contiguous(input), rows_of(words));
    let items = options.items(input.meta.shape()[0], words.meta.shape()[0]);
    assert_eq!(
        layout.columns,
        input.meta.shape()[1],
        "matrix: expected as many columns as the input has"
    );
    let format = layout.format;
    let stride = words.meta.strides()[0];
    let codes_of_word = format.codes_of_word();
    // Choose the widest vector for which the units of a plane load nearly the same number of vectors per row.
    let width = plane_width(&client);
    let columns = [VECTOR_COLUMNS, layout.group()].map(|columns| columns / codes_of_word);
    let multiples = [columns[0], columns[1], stride, layout.top()];
    let widest = vector_size(&client, size_of::<u32>(), &multiples);
    let of_vector = [4, 2, 1]
        .into_iter()
        .find(|words| *words <= widest && are_filled(items.inner() * layout.top() / words, width))
        .unwrap_or(widest);
    let vectors = layout.top() / of_vector;
    let in_flight = words_in_flight(items.rows, format, supports_pdl(&client)) / of_vector;
    let in_flight = in_flight.min(VECTORS_IN_FLIGHT);
    let vector = vector_size(&client, input.dtype.size(), &[codes_of_word]);
    let plan = plan(&client, items, vectors, &options, in_flight);
    let plan = ProjectPlan {
        reads_ahead: plan.pdl && reads_parameters,
        ..plan
    };
    let [second, third] = [&options.second, &options.third].map(|side| side.clone().map(rows_of));
    for side in second.iter().chain(&third) {
        assert_eq!(
            side.meta.strides()[0],
            stride,
            "matrices: expected rows of the same stride"
        );
    }
    let output = empty(&input, [items.rows_out, items.outputs()], input.dtype);
    let (factor, factor_place) = options.factor();
    let address_type = address_type(
        [&input, &words, &output]
            .into_iter()
            .chain(&second)
            .chain(&third)
            .chain(&factor),
    );
    let element = dtype_to_storage_type(input.dtype);
    let format = WordsFormat {
        format,
        words_of_vector: of_vector,
        converts_f16: converts_f16(&words.device),
    };
    let parts = row_parts(&words, layout);
    let argument = |words: CubeTensor| {
        WordMatrixLaunch::new(words.clone().into_tensor_arg(), words.into_tensor_arg())
    };
    // SAFETY: each unit reads input rows of its work item, and words of weight rows up to the last row of its matrix.
    // The indices of chosen experts are below the number of experts. Each unit writes only elements of `output` that
    // belong to its own work item and matrix. Tensors that are bound twice are only read.
    unsafe {
        project_words_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, items.count * items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            address_type,
            input.into_tensor_arg(),
            weight_matrices(
                words,
                [second, third],
                items.sides.launch(plan.cube_outputs()),
                argument,
            ),
            parts,
            options.expert_inputs(items.place(plan, vectors)),
            options.epilogue_inputs(factor, factor_place),
            output.clone().into_tensor_arg(),
            (items.inner() * vectors) as u32,
            format,
            plan,
            options.epilogue(),
            element,
            [vector, of_vector],
        );
    }
    output
}
