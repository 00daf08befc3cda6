//! Tests that `write_numbers`, which dequantizes int8 keys or values, writes exactly the rows that queries see.

use super::*;
use crate::auxiliary::lengths::lengths_as_read;
use crate::options::CausalAlignment;
use crate::testing::{cube_device, problem};
use burn::backend::{
    ops::{FloatTensorOps, IntTensorOps},
    read_sync,
};
use burn::tensor::TensorData;
use std::ops::Range;

const BATCH: usize = 2;
const HEADS: usize = 2;
const LENGTH: usize = 700;
const QUERIES: usize = 40;

/// The number that fills the output before the kernel runs. A row that still holds this number was not written.
const BEFORE: f32 = -7.0;

/// Reads the elements of a tensor from the device.
fn numbers(tensor: CubeTensor) -> Vec<f32> {
    let data = read_sync(CubeBackend::float_into_data(tensor)).expect("the tensor can be read");
    data.try_into_vec().expect("the tensor has dtype f32")
}

/// Returns quantized rows of `words_of_row` words each. No dequantized element equals [`BEFORE`], which marks unwritten
/// rows.
fn rows(words_of_row: usize) -> QuantizedTensors<CubeBackend> {
    let device = cube_device();
    let count = BATCH * HEADS * LENGTH;
    let words: Vec<i32> = (0..count * words_of_row)
        .map(|word| (word as i32).wrapping_mul(0x0108_7031))
        .collect();
    let scales: Vec<f32> = (0..count).map(|row| 1.0 + (row % 50) as f32).collect();
    let words = TensorData::new(words, [BATCH, HEADS, LENGTH, words_of_row]);
    let scales = TensorData::new(scales, [BATCH, HEADS, LENGTH]);
    QuantizedTensors {
        words: CubeBackend::int_from_data(words, &device),
        scales: CubeBackend::float_from_data(scales, &device),
    }
}

/// Returns the range from the first to the last key that any query sees, in a sequence of `length` keys.
fn seen(problem: &AttentionProblem, length: usize) -> Range<usize> {
    let length = length as i64;
    let offset = match problem.is_bottom_right() {
        true => length - QUERIES as i64,
        false => 0,
    };
    let side = |side: Option<usize>| side.map_or(1 << 30, |side| side as i64);
    let first = (offset - side(problem.window_left)).max(0);
    let end = (offset + QUERIES as i64 + side(problem.right())).min(length);
    first as usize..end.max(0) as usize
}

/// Checks that `write_numbers` writes only the rows that queries see. The array in `lengths` holds the number of valid
/// keys of each sequence. The flag in `lengths` selects the type of these numbers: i64 if true, i32 if false.
fn check(problem: &AttentionProblem, words_of_row: usize, lengths: Option<([usize; BATCH], bool)>) {
    let device = cube_device();
    let columns = words_of_row * CODES;
    let all = numbers(dequantized(
        rows(words_of_row),
        CodeFormat::Int8,
        DType::F32,
    ));
    let before = vec![BEFORE; all.len()];
    let before = TensorData::new(before, [BATCH, HEADS, LENGTH, columns]);
    let target = CubeBackend::float_from_data(before, &device);
    let problem = AttentionProblem {
        kv_lengths: lengths.is_some(),
        ..problem.clone()
    };
    let packed = lengths.map(|(lengths, wide)| {
        let data = match wide {
            true => TensorData::new(lengths.map(|x| x as i64).to_vec(), [BATCH]),
            false => TensorData::new(lengths.map(|x| x as i32).to_vec(), [BATCH]),
        };
        lengths_as_read(&CubeBackend::int_from_data(data, &device), &problem)
    });
    write_numbers(
        rows(words_of_row),
        CodeFormat::Int8,
        &target,
        Some((&problem, packed)),
    );
    let found = numbers(target);
    for (row, (found, whole)) in found.chunks(columns).zip(all.chunks(columns)).enumerate() {
        let length = lengths.map_or(LENGTH, |(lengths, _)| lengths[row / LENGTH / HEADS]);
        let is_seen = seen(&problem, length).contains(&(row % LENGTH));
        let is_whole = found == whole;
        let is_untouched = found.iter().all(|x| *x == BEFORE);
        assert!(
            if is_seen { is_whole } else { is_untouched },
            "row {} of {length}: {found:?}, dequantized in full {whole:?}, {problem:?}",
            row % LENGTH
        );
    }
}

/// Checks that the kernel writes the rows that the causal mask, the window and the lengths leave visible, and no other rows.
#[test]
fn write_numbers_hidden_rows_stay_unwritten() {
    use CausalAlignment::{BottomRight, TopLeft};
    for (causal, window_left, window_right) in [
        (None, None, None),
        (Some(BottomRight), None, None),
        (Some(BottomRight), Some(100), None),
        (Some(TopLeft), Some(3), None),
        (None, Some(30), Some(50)),
        (None, None, Some(5)),
    ] {
        let problem = AttentionProblem {
            dtype: DType::F32,
            causal,
            window_left,
            window_right,
            ..problem([BATCH, HEADS, HEADS, QUERIES, LENGTH, 32])
        };
        for lengths in [None, Some(([37, 333], false)), Some(([0, LENGTH], true))] {
            // The test has rows of one word, of several words, and of more words than a cube handles at once.
            for words_of_row in [1, 33, 1100] {
                check(&problem, words_of_row, lengths);
            }
        }
    }
}
