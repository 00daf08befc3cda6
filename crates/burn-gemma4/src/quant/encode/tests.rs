//! Compares quantized blocks with those of llama.cpp's reference quantizers. `tests/fixtures/gguf/make_k_quants.py`
//! makes the fixture.

use super::*;
use safetensors::SafeTensors;

/// The formats that can be written, with ggml's names.
fn written() -> impl Iterator<Item = (BlockFormat, &'static str)> {
    let formats = BlockFormat::ALL.into_iter();
    formats.filter(|(format, _)| format.encoder().is_some())
}

struct Fixture {
    bytes: Vec<u8>,
    rows: usize,
    columns: usize,
    numbers: Vec<f32>,
    importance: Vec<f32>,
}

impl Fixture {
    fn read() -> Self {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gguf");
        let path = format!("{folder}/k_quants.safetensors");
        let bytes = std::fs::read(path).expect("the fixture exists");
        let file = SafeTensors::deserialize(&bytes).expect("the fixture is valid safetensors");
        let floats = |name: &str| -> Vec<f32> {
            let tensor = file.tensor(name).expect(name);
            let floats = tensor.data().as_chunks().0.iter();
            floats.map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let shape = file.tensor("numbers").expect("numbers").shape().to_vec();
        Self {
            rows: shape[0],
            columns: shape[1],
            numbers: floats("numbers"),
            importance: floats("importance"),
            bytes,
        }
    }

    fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.columns..(row + 1) * self.columns;
        (&self.numbers[range.clone()], &self.importance[range])
    }
}

/// Checks all rows of the fixture: normal numbers, outliers, zeros, equal numbers, tiny and huge numbers, numbers of one
/// sign, and numbers halfway between two codes. The output buffer is poisoned, so that unwritten bytes are found.
#[test]
fn encoder_of_every_format_equals_llama_cpp_bitwise() {
    let fixture = Fixture::read();
    let file = SafeTensors::deserialize(&fixture.bytes).expect("the fixture is valid safetensors");
    let mut formats = 0;
    for (format, name) in written() {
        let row_bytes = fixture.columns / format.numbers() * format.bytes();
        for weighted in [false, true] {
            let tensor = match weighted {
                false => format!("{name}.blocks"),
                true => format!("{name}.weighted"),
            };
            let blocks = file.tensor(&tensor).expect(&tensor);
            assert_eq!(blocks.shape(), [fixture.rows, row_bytes], "{tensor}");
            for row in 0..fixture.rows {
                let (numbers, importance) = fixture.row(row);
                let mut found = vec![0xa5; row_bytes];
                assert!(
                    format.encode(numbers, weighted.then_some(importance), &mut found),
                    "{tensor}, row {row}"
                );
                let expected = &blocks.data()[row * row_bytes..][..row_bytes];
                assert_eq!(found, expected, "{tensor}, row {row}");
            }
        }
        formats += 1;
    }
    assert_eq!(formats, 10);
}

/// Checks that a row with an element that is NaN or infinite, or too large for a scale in f16, is reported. A weight
/// that makes sums overflow is reported too.
#[test]
fn encoder_of_numbers_without_scale_returns_false() {
    for (format, name) in written() {
        for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38] {
            for importance in [None, Some(&[1f32; 512][..])] {
                let mut numbers = [0.5; 512];
                numbers[300] = broken;
                let mut blocks = vec![0; 512 / format.numbers() * format.bytes()];
                let is_valid = format.encode(&numbers, importance, &mut blocks);
                assert!(!is_valid, "{name}, {broken}");
            }
        }
        for broken in [f32::NAN, f32::INFINITY, 1e35] {
            let mut importance = [1.0; 512];
            importance[300] = broken;
            let mut blocks = vec![0; 512 / format.numbers() * format.bytes()];
            let is_valid = format.encode(&[0.5; 512], Some(&importance), &mut blocks);
            assert!(!is_valid, "{name}, importance {broken}");
        }
    }
}

/// Checks that more bits give a smaller error, and that an importance matrix lowers the weighted error.
#[test]
fn encoder_error_falls_with_bits_and_with_importance() {
    let mut state = 7u32;
    let mut uniform = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    let numbers: Vec<f32> = (0..4096)
        .map(|_| uniform() + uniform() + uniform() - 1.5)
        .collect();
    let importance: Vec<f32> = (0..4096).map(|_| (8.0 * uniform()).exp()).collect();
    let errors = |format: BlockFormat, given: Option<&[f32]>| {
        let mut blocks = vec![0; numbers.len() / format.numbers() * format.bytes()];
        assert!(format.encode(&numbers, given, &mut blocks));
        let mut found = vec![0f32; numbers.len()];
        format.dequantize(&blocks, &mut found);
        let squares = numbers.iter().zip(&found).map(|(a, b)| (a - b) * (a - b));
        let weighted: f32 = squares.clone().zip(&importance).map(|(a, b)| a * b).sum();
        (squares.sum::<f32>(), weighted)
    };
    let mut last = f32::MAX;
    for format in [
        BlockFormat::Q2K,
        BlockFormat::Q3K,
        BlockFormat::Q4K,
        BlockFormat::Q5K,
        BlockFormat::Q6K,
    ] {
        let plain = errors(format, None);
        let weighted = errors(format, Some(&importance));
        assert!(plain.0 < last, "{format:?}: {plain:?}");
        assert!(weighted.1 < plain.1, "{format:?}: {weighted:?}, {plain:?}");
        last = plain.0;
    }
}
