//! Launches the kernels that make words of int8 of rows, and rows of those.

mod kernel;

use self::kernel::{DEQUANTIZE_UNITS, UNITS, WORDS_OF_UNIT, dequantize, quantize};
use crate::AttentionProblem;
use crate::arguments::is_in_vectors;
use crate::backend::QuantizedTensors;
use crate::math::visibility::{ExtentLaunch, Structure};
use crate::passes::lengths::Places;
use crate::quantized::CODES;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// Words and scales of `[batch, kv_heads, kv_len, columns]` in an element that kernels read.
pub(crate) fn quantized(rows: CubeTensor) -> QuantizedTensors<CubeBackend> {
    let shape = rows.meta.shape();
    let [batch, heads, length, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let words = empty(&rows, [batch, heads, length, columns / CODES], DType::I32);
    let scales = empty(&rows, [batch, heads, length], DType::F32);
    write(rows, None, &words, &scales);
    QuantizedTensors { words, scales }
}

/// Writes rows `[batch, kv_heads, count, columns]` over slots of words, `[batch, kv_heads, slots, columns / 4]`, and scales,
/// `[batch, kv_heads, slots, …]`, quantized as [`QuantizedRows::new`](crate::quantized::QuantizedRows::new) does: for caches of keys and values
/// on CubeCL devices. With `positions`, `[batch · count]` integers, of which those of a sequence follow each other, the row at a position is
/// read at the position modulo `count` and written at the position modulo `slots`. Every handle to the memory sees what was written.
///
/// # Panics
/// Where the tensors do not fit each other.
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
    assert!(fits(words) && fits(scales), "slots of these heads");
    assert_eq!(
        words.meta.shape()[3] * CODES,
        columns,
        "words of these rows"
    );
    assert_eq!(
        words.meta.shape()[2],
        scales.meta.shape()[2],
        "a scale a row"
    );
    assert!(
        columns == 0 || words.meta.strides()[3] == 1,
        "a row's words lie together"
    );
    let all_rows = batch * heads * length;
    if all_rows == 0 {
        return;
    }
    if let Some(positions) = &positions {
        let count = positions.meta.shape().num_elements();
        assert_eq!(count, batch * length, "a position for each row");
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
    // SAFETY: a cube below `all_rows` reads one row, by its strides, and writes words and scale of one slot of the same head, of which there
    // are as many as was checked; the rest stops at once.
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

/// Rows of these words and scales in an element that kernels write.
pub(crate) fn dequantized(rows: QuantizedTensors<CubeBackend>, dtype: DType) -> CubeTensor {
    let target = empty_rows(&rows, dtype);
    write_numbers(rows, &target, None);
    target
}

/// The keys or values of a problem, dequantized from the first to the last row that a query of the sequence sees.
///
/// Causal mask, window and `lengths` decide what a query sees. All other rows are uninitialized memory and may be NaN: an attention must not
/// read them.
pub(crate) fn dequantized_where_seen(
    rows: QuantizedTensors<CubeBackend>,
    problem: &AttentionProblem,
    lengths: Option<CubeTensor>,
) -> CubeTensor {
    let target = empty_rows(&rows, problem.dtype);
    write_numbers(rows, &target, Some((problem, lengths)));
    target
}

/// An uninitialized tensor for the dequantized rows.
fn empty_rows(rows: &QuantizedTensors<CubeBackend>, dtype: DType) -> CubeTensor {
    let shape = rows.words.meta.shape();
    let [batch, heads, length, words_of_row] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let target = [batch, heads, length, words_of_row * CODES];
    empty(&rows.words, target, dtype)
}

/// The most cubes of a launch. The number is larger than what a device runs at once, and small enough that cubes without rows cost little
/// time.
const MOST_CUBES: usize = 4096;

/// Dequantizes `rows` into `target`: all rows, or only the rows that the queries of a problem see.
fn write_numbers(
    rows: QuantizedTensors<CubeBackend>,
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
    let (extent, lengths) = match seen_by {
        Some((problem, lengths)) => (Places::of_lengths().extent(problem), lengths),
        None => (ExtentLaunch::new(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), None),
    };
    let structure = Structure {
        lengths: lengths.is_some(),
        lengths_ahead: false,
        segments: false,
        mask: false,
    };
    // SAFETY: a cube below `planes · cubes_of_head` reads words and scales of rows below `length` of its head, by their strides, and writes
    // those words' numbers; the rest stops at once.
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
            extent,
            heads as u32,
            planes,
            length as u32,
            words_of_row as u32,
            rows_of_cube as u32,
            cubes_of_head as u32,
            is_bounded,
            structure,
            dtype_to_storage_type(target.dtype),
            CODES,
        );
    }
}

#[cfg(test)]
mod tests;
