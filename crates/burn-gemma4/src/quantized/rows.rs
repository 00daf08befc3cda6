//! Rows of quantized numbers in the dtype that a model computes in, by all cores.

use burn::tensor::{DType, TensorData, bf16, f16};
use std::{num::NonZero, ops::Range, thread};

/// Bytes that a thread is worth starting for.
const WORTH: usize = 1 << 18;

/// Rows as a tensor of this shape in `dtype`, which is f32, f16 or bf16: `dequantize` writes the numbers of one in f32. The host holds
/// them in `dtype` alone.
pub(crate) fn dequantized(
    rows: Range<usize>,
    shape: Vec<usize>,
    dtype: DType,
    dequantize: impl Fn(usize, &mut [f32]) + Sync,
) -> TensorData {
    let columns = shape.last().copied().unwrap_or(1);
    let row_bytes = columns * dtype.size();
    let mut bytes = vec![0; rows.len() * row_bytes];
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = (bytes.len() / WORTH).clamp(1, cores);
    let rows_of_thread = rows.len().div_ceil(threads).max(1);
    let write = |first: usize, bytes: &mut [u8]| {
        let mut numbers = vec![0.0; columns];
        for (row, bytes) in (first..).zip(bytes.chunks_exact_mut(row_bytes)) {
            dequantize(row, &mut numbers);
            rounded(&numbers, dtype, bytes);
        }
    };
    let firsts = rows.step_by(rows_of_thread);
    let parts = firsts.zip(bytes.chunks_mut(rows_of_thread * row_bytes));
    match threads {
        1 => parts.for_each(|(first, bytes)| write(first, bytes)),
        _ => thread::scope(|scope| {
            for (first, bytes) in parts {
                scope.spawn(move || write(first, bytes));
            }
        }),
    }
    TensorData::from_bytes_vec(bytes, shape, dtype)
}

/// Writes numbers in `dtype`.
fn rounded(numbers: &[f32], dtype: DType, bytes: &mut [u8]) {
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
    fn rows_are_where_they_belong_in_every_dtype() {
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
