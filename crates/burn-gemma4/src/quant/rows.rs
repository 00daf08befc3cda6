//! Dequantizes rows to a model's dtype, or packs rows into words, on all CPU cores.

use burn::tensor::{DType, TensorData, bf16, f16};
use std::{num::NonZero, ops::Range, thread};

/// The minimum number of output bytes per thread. For fewer bytes, starting a thread costs more time than the thread
/// saves.
const WORTH: usize = 1 << 18;

/// Dequantizes rows to a tensor of shape `shape` in `dtype`, which is f32, f16 or bf16. `dequantize` writes one row in
/// f32.
pub(crate) fn dequantized(
    rows: Range<usize>,
    shape: Vec<usize>,
    dtype: DType,
    dequantize: impl Fn(usize, &mut [f32]) + Sync,
) -> TensorData {
    let columns = shape.last().copied().unwrap_or(1);
    let bytes = written(
        rows,
        columns * dtype.size(),
        || vec![0.0; columns],
        |row, numbers, bytes| {
            dequantize(row, numbers);
            rounded(numbers, dtype, bytes);
        },
    );
    TensorData::from_bytes_vec(bytes, shape, dtype)
}

/// Packs rows into a matrix `[rows, words]` of u32. The function `pack` writes one row, whose words are zero before the
/// call.
pub(crate) fn packed(
    rows: Range<usize>,
    words: usize,
    pack: impl Fn(usize, &mut [u32]) + Sync,
) -> TensorData {
    let shape = [rows.len(), words];
    let bytes = written(
        rows,
        words * size_of::<u32>(),
        || vec![0u32; words],
        |row, words, bytes| {
            words.fill(0);
            pack(row, words);
            for (word, bytes) in words.iter().zip(bytes.as_chunks_mut().0) {
                *bytes = word.to_le_bytes();
            }
        },
    );
    TensorData::from_bytes_vec(bytes, shape, DType::U32)
}

/// Returns the bytes of all rows. `write` writes one row, with the scratch memory that `space` creates once per thread.
pub(crate) fn written<S>(
    rows: Range<usize>,
    row_bytes: usize,
    space: impl Fn() -> S + Sync,
    write: impl Fn(usize, &mut S, &mut [u8]) + Sync,
) -> Vec<u8> {
    let mut bytes = vec![0; rows.len() * row_bytes];
    write_rows(&mut bytes, rows, row_bytes, space, write);
    bytes
}

/// Writes all rows into `bytes`, which has `rows.len() · row_bytes` bytes. `write` writes one row, with the scratch
/// memory that `space` creates once per thread.
pub(crate) fn write_rows<S>(
    bytes: &mut [u8],
    rows: Range<usize>,
    row_bytes: usize,
    space: impl Fn() -> S + Sync,
    write: impl Fn(usize, &mut S, &mut [u8]) + Sync,
) {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = (bytes.len() / WORTH).clamp(1, cores);
    let rows_of_thread = rows.len().div_ceil(threads).max(1);
    let write = |first: usize, bytes: &mut [u8]| {
        let mut space = space();
        for (row, bytes) in (first..).zip(bytes.chunks_exact_mut(row_bytes)) {
            write(row, &mut space, bytes);
        }
    };
    let firsts = rows.step_by(rows_of_thread);
    let parts = firsts.zip(bytes.chunks_mut(rows_of_thread * row_bytes));
    match threads {
        1 => parts.for_each(|(first, bytes)| write(first, bytes)),
        _ => thread::scope(|scope| {
            for (first, bytes) in parts {
                let write = &write;
                scope.spawn(move || write(first, bytes));
            }
        }),
    }
}

/// Converts the elements of a row from `dtype` to f32.
pub(crate) fn numbers(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F16 => each(bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
        DType::BF16 => each(bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        DType::F64 => each(bytes, |bytes| f64::from_le_bytes(bytes) as f32),
        _ => each(bytes, f32::from_le_bytes),
    }
}

fn each<const SIZE: usize>(bytes: &[u8], number: impl Fn([u8; SIZE]) -> f32) -> Vec<f32> {
    let (numbers, _) = bytes.as_chunks();
    numbers.iter().map(|bytes| number(*bytes)).collect()
}

/// Writes f32 elements in `dtype`.
pub(crate) fn rounded(numbers: &[f32], dtype: DType, bytes: &mut [u8]) {
    match dtype {
        DType::F16 => {
            for (number, bytes) in numbers.iter().zip(bytes.as_chunks_mut().0) {
                *bytes = f16::from_f32(*number).to_le_bytes();
            }
        }
        DType::BF16 => {
            for (number, bytes) in numbers.iter().zip(bytes.as_chunks_mut().0) {
                *bytes = bf16::from_f32(*number).to_le_bytes();
            }
        }
        _ => {
            for (number, bytes) in numbers.iter().zip(bytes.as_chunks_mut().0) {
                *bytes = number.to_le_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dequantized_in_every_dtype_puts_rows_in_place() {
        for (rows, columns) in [(3..5, 7), (0..1, 1), (10..3000, 300)] {
            let number = |row: usize, column: usize| (row % 64) as f32 + column as f32 / 1024.0;
            let shape = vec![rows.len(), columns];
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let found = dequantized(rows.clone(), shape.clone(), dtype, |row, numbers| {
                    for (column, value) in numbers.iter_mut().enumerate() {
                        *value = number(row, column);
                    }
                });
                let numbers = rows
                    .clone()
                    .flat_map(|row| (0..columns).map(move |column| number(row, column)));
                let expected = TensorData::new(numbers.collect::<Vec<f32>>(), shape.clone());
                assert_eq!(
                    found,
                    expected.convert_dtype(dtype),
                    "{rows:?} of {columns}"
                );
            }
        }
    }
}
