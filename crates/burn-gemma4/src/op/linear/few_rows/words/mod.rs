//! Products of a few rows with quantized weights.

mod kernel;

#[cfg(feature = "cuda")]
use super::matrix_units;
use super::{
    launch::{LaunchOptions, plan},
    sums::ProjectPlan,
};
use crate::{
    op::{
        dequantize::row_parts,
        launch::{converts_f16, plane_width, rows_of, vector_size},
    },
    quantized::layout::{Format, Layout},
};
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::{
    launch::{address_type, empty, exact_cube_count},
    overlap::overlaps,
};
use cubecl::prelude::CubeDim;
use kernel::{WordsFormat, project_words_overlapped};

/// Columns of a vector of codes at most, which is also within one group of columns. The units of a plane read their inputs as far from each other: with twice as many columns each
/// read would touch twice as many lines of the cache, which then is busier than the memory.
const VECTOR_COLUMNS: usize = 16;
/// Vectors that a unit has in flight at most.
const VECTORS_IN_FLIGHT: usize = 16;

/// Words that a unit has in flight. Of one row on an H200, decoding's tokens/s: with 8, 16 and 32 words 622, 677 and 676 of E2B in Q4_0, with 16 and 32 376 and 413 of E4B in it, and
/// 588 and 576 of E2B, 187 and 189 of 12B in Q8_0. With 32 vectors of a word each, which divide 12B's columns, 193 for 211 with 16. The others were not measured.
fn words_in_flight(rows: usize, format: Format, overlaps: bool) -> usize {
    match rows == 1 && format.top_bits() == 0 && overlaps {
        true => 32,
        false => 16,
    }
}

/// `[rows, columns in]` times the transpose of the rows of `words`; other matrices of the options are words of the same layout.
pub(super) fn launch(
    input: CubeTensor,
    words: CubeTensor,
    layout: Layout,
    mut options: LaunchOptions,
) -> CubeTensor {
    #[cfg(feature = "cuda")]
    if let Some(plan) = matrix_units::plan_of_words(&input, &words, layout, &options) {
        return matrix_units::multiply_words(input, words, layout, options, plan);
    }
    let client = input.client.clone();
    let reads_parameters = options.reads_parameters(&words);
    let (input, words) = (into_contiguous(input), rows_of(words));
    let items = options.items(input.meta.shape()[0], words.meta.shape()[0]);
    assert_eq!(
        layout.columns,
        input.meta.shape()[1],
        "as many columns as the rows"
    );
    let format = layout.format;
    let stride = words.meta.strides()[0];
    let codes_of_word = format.codes_of_word();
    // As wide as the units of a plane all have a vector.
    let width = plane_width(&client);
    let columns = [VECTOR_COLUMNS, layout.group()].map(|columns| columns / codes_of_word);
    let multiples = [columns[0], columns[1], stride, layout.top()];
    let widest = vector_size(&client, size_of::<u32>(), &multiples);
    let of_vector = [4, 2, 1]
        .into_iter()
        .find(|words| *words <= widest && (layout.top() / words).is_multiple_of(width))
        .unwrap_or(widest);
    let vectors = layout.top() / of_vector;
    let in_flight = words_in_flight(items.rows, format, overlaps(&client)) / of_vector;
    let in_flight = in_flight.min(VECTORS_IN_FLIGHT);
    let vector = vector_size(&client, input.dtype.size(), &[codes_of_word]);
    let plan = plan(&client, items, vectors, &options, in_flight);
    let plan = ProjectPlan {
        reads_ahead: plan.overlaps && reads_parameters,
        ..plan
    };
    let [second, third] = [&options.second, &options.third].map(|side| side.clone().map(rows_of));
    for side in second.iter().chain(&third) {
        assert_eq!(side.meta.strides()[0], stride, "rows of one layout");
    }
    let output = empty(&input, [items.rows_out, items.outputs()], input.dtype);
    let (factor, factor_place) = options.factor();
    let [experts, shares] = options.experts();
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
        converts_f16: converts_f16(&words.device),
    };
    let argument = |tensor: Option<CubeTensor>| tensor.map(CubeTensor::into_tensor_arg);
    // SAFETY: a unit reads vectors of codes of the rows that the shapes have, and the parts of these rows that the layout has, of
    // experts of those that were chosen among them; it writes the outputs below those of its item or matrix. What is bound twice is only read.
    unsafe {
        project_words_overlapped::launch_unchecked(
            &client,
            exact_cube_count(&client, items.count * items.cubes(plan)),
            CubeDim::new_2d(plan.team.units as u32, plan.teams as u32),
            address_type,
            input.into_tensor_arg(),
            words.clone().into_tensor_arg(),
            words.clone().into_tensor_arg(),
            argument(second.clone()).into(),
            argument(second).into(),
            argument(third.clone()).into(),
            argument(third).into(),
            argument(experts).into(),
            argument(shares).into(),
            argument(factor).into(),
            output.clone().into_tensor_arg(),
            factor_place,
            items.place(plan, vectors),
            items.sides.launch(plan),
            row_parts(&words, layout),
            (items.inner() * vectors) as u32,
            options.cap.unwrap_or(1.0) as f32,
            format,
            plan,
            options.epilogue(),
            element,
            vector,
            of_vector,
        );
    }
    output
}
