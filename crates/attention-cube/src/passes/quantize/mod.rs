//! Launches the kernels that make words of int8 of rows, and rows of those.

mod kernel;

use self::kernel::{UNITS, dequantize, quantize};
use crate::arguments::is_in_vectors;
use crate::backend::QuantizedTensors;
use crate::quantized::CODES;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// Words and scales of `[batch, kv_heads, kv_len, columns]` in an element that kernels read.
pub(crate) fn quantized(rows: CubeTensor) -> QuantizedTensors<CubeBackend> {
    let client = rows.client.clone();
    let shape = rows.meta.shape();
    let [batch, heads, length, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let words = empty(&rows, [batch, heads, length, columns / CODES], DType::I32);
    let scales = empty(&rows, [batch, heads, length], DType::F32);
    let all_rows = batch * heads * length;
    if all_rows > 0 {
        let vector = if is_in_vectors(&rows, CODES) {
            CODES
        } else {
            1
        };
        let element = dtype_to_storage_type(rows.dtype);
        // SAFETY: a cube below `all_rows` reads one row, by its strides, and writes that row's words and its scale; the rest stops at once.
        unsafe {
            quantize::launch_unchecked(
                &client,
                cube_count(&client, all_rows),
                CubeDim::new_1d(UNITS as u32),
                address_type([&rows, &words]),
                rows.into_tensor_arg(),
                words.clone().into_tensor_arg(),
                scales.clone().into_tensor_arg(),
                heads as u32,
                length as u32,
                columns as u32,
                all_rows,
                f32::NAN,
                element,
                vector,
            );
        }
    }
    QuantizedTensors { words, scales }
}

/// Rows of these words and scales in an element that kernels write.
pub(crate) fn dequantized(rows: QuantizedTensors<CubeBackend>, dtype: DType) -> CubeTensor {
    let QuantizedTensors { words, scales } = rows;
    let client = words.client.clone();
    let shape = words.meta.shape();
    let [batch, heads, length, words_of_row] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let rows = empty(&words, [batch, heads, length, words_of_row * CODES], dtype);
    let all_words = batch * heads * length * words_of_row;
    if all_words > 0 {
        // SAFETY: a unit below `all_words` reads one word and its row's scale, by their strides, and writes that word's numbers.
        unsafe {
            dequantize::launch_unchecked(
                &client,
                cube_count(&client, all_words.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                address_type([&words, &scales, &rows]),
                words.into_tensor_arg(),
                scales.into_tensor_arg(),
                rows.clone().into_tensor_arg(),
                heads as u32,
                length as u32,
                words_of_row as u32,
                all_words,
                dtype_to_storage_type(dtype),
                CODES,
            );
        }
    }
    rows
}
