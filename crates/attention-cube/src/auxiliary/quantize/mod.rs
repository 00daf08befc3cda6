//! Launches the kernels that quantize rows to words of 8-bit codes, and dequantize them.

mod kernel;

use self::kernel::{DEQUANTIZE_UNITS, UNITS, WORDS_OF_UNIT, dequantize, quantize, quantize_e4m3};
use self::kernel::{DequantizeSizesLaunch, RowSizesLaunch};
use crate::auxiliary::lengths::BoundsOffsets;
use crate::kernel_args::is_in_vectors;
use crate::math::visibility::{SeqLensLaunch, Structure};
use crate::problem::AttentionProblem;
use crate::types::quantized::{CODES, CodeFormat};
use crate::types::tensors::QuantizedTensors;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// Quantizes rows `[batch, kv_heads, kv_len, columns]` into words and scales. Kernels must support the dtype of the rows.
pub(crate) fn quantized(rows: CubeTensor) -> QuantizedTensors<CubeBackend> {
    let shape = rows.meta.shape();
    let [batch, heads, length, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let words = empty(&rows, [batch, heads, length, columns / CODES], DType::I32);
    let scales = empty(&rows, [batch, heads, length], DType::F32);
    write(rows, None, &words, &scales);
    QuantizedTensors { words, scales }
}

/// Quantizes rows and writes them into the row slots of an int8 KV cache on a CubeCL device.
///
/// The codes and scales equal those of [`QuantizedRows::new`](crate::types::quantized::QuantizedRows::new). Without
/// `positions`, row `i` is written to slot `i`. For each position `p` in `positions`, source row `p % count` is written to
/// slot `p % slots`. The function writes in place, so every handle to the memory of `words` and `scales` sees the new rows.
///
/// # Shapes
/// `rows [batch, kv_heads, count, columns]`, `words [batch, kv_heads, slots, columns / 4]`,
/// `scales [batch, kv_heads, slots, …]`. `positions` has `[batch · count]` integers, consecutive within a sequence.
///
/// # Panics
/// Panics if the tensors do not fit each other.
pub fn write(
    rows: CubeTensor,
    positions: Option<CubeTensor>,
    words: &CubeTensor,
    scales: &CubeTensor,
) {
    let client = rows.client.clone();
    let rows = untile(rows);
    let shape = rows.meta.shape();
    let [batch, heads, length, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let fits = |tensor: &CubeTensor| {
        let shape = tensor.meta.shape();
        let slots = shape[2];
        let holds = positions.is_some() || slots == length;
        [shape[0], shape[1]] == [batch, heads] && holds && (slots > 0 || length == 0)
    };
    assert!(
        fits(words) && fits(scales),
        "words and scales must have the rows' batch and heads, and enough slots"
    );
    assert_eq!(
        words.meta.shape()[3] * CODES,
        columns,
        "words must have columns / 4 elements per row"
    );
    assert_eq!(
        words.meta.shape()[2],
        scales.meta.shape()[2],
        "words and scales must have the same number of slots"
    );
    assert!(
        columns == 0 || words.meta.strides()[3] == 1,
        "the words of a row must be contiguous"
    );
    let all_rows = batch * heads * length;
    if all_rows == 0 {
        return;
    }
    if let Some(positions) = &positions {
        let count = positions.meta.shape().num_elements();
        assert_eq!(
            count,
            batch * length,
            "positions must have one element per row"
        );
    }
    let vector = if is_in_vectors(&rows, CODES) {
        CODES
    } else {
        1
    };
    let element = dtype_to_storage_type(rows.dtype);
    let integer = positions
        .as_ref()
        .map_or(DType::I32, |positions| positions.dtype);
    // SAFETY: cubes whose index is not below `all_rows` stop at once. Every other cube reads one row of `rows`, and writes
    // one slot of `words` and `scales`. The caller has checked that the slot exists.
    unsafe {
        quantize::launch_unchecked(
            &client,
            cube_count(&client, all_rows),
            CubeDim::new_1d(UNITS as u32),
            address_type([&rows, words]),
            rows.into_tensor_arg(),
            positions
                .map(|positions| into_contiguous(positions).into_tensor_arg())
                .into(),
            words.clone().into_tensor_arg(),
            scales.clone().into_tensor_arg(),
            heads as u32,
            length as u32,
            columns as u32,
            all_rows,
            f32::NAN,
            element,
            dtype_to_storage_type(integer),
            vector,
        );
    }
}

/// Divides rows `[batch, kv_heads, kv_len, columns]` by `scales`, and packs the quotients as words of four e4m3 codes.
/// `scales` is `[batch, kv_heads, kv_len]`. Kernels must support the dtype of the rows.
pub(crate) fn e4m3_words(rows: CubeTensor, scales: CubeTensor) -> CubeTensor {
    let client = rows.client.clone();
    let shape = rows.meta.shape();
    let [batch, heads, length, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let words = empty(&rows, [batch, heads, length, columns / CODES], DType::I32);
    let all_words = words.meta.num_elements();
    if all_words == 0 {
        return words;
    }
    let vector = match is_in_vectors(&rows, CODES) {
        true => CODES,
        false => 1,
    };
    let element = dtype_to_storage_type(rows.dtype);
    // SAFETY: units whose index is not below `all_words` stop at once. Every other unit reads four columns of one row and the
    // row's scale, and writes one word. `scales` has as many rows as `rows`.
    unsafe {
        quantize_e4m3::launch_unchecked(
            &client,
            cube_count(&client, all_words.div_ceil(DEQUANTIZE_UNITS)),
            CubeDim::new_1d(DEQUANTIZE_UNITS as u32),
            address_type([&rows, &scales, &words]),
            rows.into_tensor_arg(),
            scales.into_tensor_arg(),
            words.clone().into_tensor_arg(),
            RowSizesLaunch::new(heads as u32, length as u32, columns as u32, all_words),
            element,
            vector,
        );
    }
    words
}

/// Dequantizes all rows to `dtype`. Kernels must support this dtype.
pub(crate) fn dequantized(
    rows: QuantizedTensors<CubeBackend>,
    format: CodeFormat,
    dtype: DType,
) -> CubeTensor {
    let target = empty_rows(&rows, dtype);
    write_numbers(rows, format, &target, None);
    target
}

/// Dequantizes the keys or values of a problem, from the first to the last row that any query of the sequence sees.
/// Causal mask, window and `lengths` decide what a query sees. All other rows stay uninitialized and may be NaN.
pub(crate) fn dequantized_where_seen(
    rows: QuantizedTensors<CubeBackend>,
    problem: &AttentionProblem,
    lengths: Option<CubeTensor>,
) -> CubeTensor {
    let target = empty_rows(&rows, problem.dtype);
    let format = problem
        .quantized
        .expect("a call over quantized rows has a format");
    write_numbers(rows, format, &target, Some((problem, lengths)));
    target
}

/// Allocates an uninitialized tensor for the dequantized rows.
fn empty_rows(rows: &QuantizedTensors<CubeBackend>, dtype: DType) -> CubeTensor {
    let shape = rows.words.meta.shape();
    let [batch, heads, length, words_of_row] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let target = [batch, heads, length, words_of_row * CODES];
    empty(&rows.words, target, dtype)
}

/// The largest number of cubes in a launch of `dequantize` over at most this number of heads. A launch over more heads
/// has one cube per head. The limit exceeds the number of cubes that a device runs at once. The limit is still so small
/// that cubes without rows cost little.
const MOST_CUBES: usize = 4096;

/// Dequantizes `rows` into `target`: all rows, or only the rows that the queries of a problem see.
fn write_numbers(
    rows: QuantizedTensors<CubeBackend>,
    format: CodeFormat,
    target: &CubeTensor,
    seen_by: Option<(&AttentionProblem, Option<CubeTensor>)>,
) {
    let QuantizedTensors { words, scales } = rows;
    let client = words.client.clone();
    let shape = words.meta.shape();
    let [batch, heads, length, words_of_row] = [0, 1, 2, 3].map(|dim| shape[dim]);
    if batch * heads * length * words_of_row == 0 {
        return;
    }
    let planes = batch * heads;
    let rows_of_cube = (DEQUANTIZE_UNITS * WORDS_OF_UNIT / words_of_row).max(1);
    let written = seen_by.as_ref().map_or(length, |(problem, _)| {
        problem.visible_keys(problem.q_len).min(length)
    });
    let cubes_of_head = written
        .div_ceil(rows_of_cube)
        .min((MOST_CUBES / planes).max(1));
    let is_bounded = seen_by.is_some();
    let (seq_lens, lengths) = match seen_by {
        Some((problem, lengths)) => (BoundsOffsets::of_lengths().seq_lens(problem), lengths),
        None => (SeqLensLaunch::new(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), None),
    };
    let structure = Structure::of_key_lengths(lengths.is_some());
    // SAFETY: cubes whose index is not below `planes · cubes_of_head` stop at once. Every other cube reads the words
    // and scales of rows below `length` in its head, and writes the elements of these rows to `target`. `target` has as
    // many rows as `words`.
    unsafe {
        dequantize::launch_unchecked(
            &client,
            cube_count(&client, planes * cubes_of_head),
            CubeDim::new_1d(DEQUANTIZE_UNITS as u32),
            address_type([&words, &scales, target]),
            words.into_tensor_arg(),
            scales.into_tensor_arg(),
            lengths.map(CubeTensor::into_tensor_arg).into(),
            target.clone().into_tensor_arg(),
            seq_lens,
            DequantizeSizesLaunch::new(
                heads as u32,
                planes,
                length as u32,
                words_of_row as u32,
                rows_of_cube as u32,
                cubes_of_head as u32,
            ),
            is_bounded,
            format,
            structure,
            dtype_to_storage_type(target.dtype),
            CODES,
        );
    }
}

#[cfg(test)]
mod tests;
