//! Quantizes weights to blocks by ggml's definitions. The largest absolute element of a block determines the block's
//! scale. Each element gets the nearest code.

use super::{blocks::BlockFormat, layout::Layout, pack::Row};
use burn::tensor::f16;

/// The number of elements in a block.
const COLUMNS: usize = 32;

/// The block format to which weights are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuantTarget {
    /// 8-bit codes, as ggml defines Q8_0.
    Q8,
    /// 4-bit codes, as ggml defines Q4_0.
    Q4,
}

impl QuantTarget {
    /// Returns the GGUF block format that stores these codes.
    pub fn format(self) -> BlockFormat {
        match self {
            Self::Q8 => BlockFormat::Q8_0,
            Self::Q4 => BlockFormat::Q4_0,
        }
    }

    /// Returns the layout of rows with `columns` columns, or `None` if the columns do not form whole blocks.
    pub fn layout(self, columns: usize) -> Option<Layout> {
        self.format().words(columns)
    }

    /// Quantizes a row into `words`, which must be all zero. A block with an element that is not finite gets the scale
    /// NaN, so that the error stays visible after dequantization.
    pub fn pack(self, layout: Layout, numbers: &[f32], words: &mut [u32]) {
        let mut row = Row { layout, words };
        let mut codes = [0; COLUMNS];
        for (block, numbers) in numbers.chunks_exact(COLUMNS).enumerate() {
            let scale = self.codes(numbers, &mut codes);
            row.codes(block * COLUMNS, &codes);
            row.half(block, scale.to_bits());
        }
    }

    /// Quantizes a row into the blocks of a GGUF file. Returns true if all elements are finite and all scales fit into
    /// f16.
    pub fn write(self, numbers: &[f32], bytes: &mut [u8]) -> bool {
        let mut codes = [0; COLUMNS];
        let mut are_numbers = true;
        let blocks = bytes.chunks_exact_mut(self.format().bytes());
        for (block, numbers) in blocks.zip(numbers.chunks_exact(COLUMNS)) {
            let scale = self.codes(numbers, &mut codes);
            are_numbers &= scale.is_finite();
            let (of_scale, of_codes) = block.split_at_mut(2);
            of_scale.copy_from_slice(&scale.to_le_bytes());
            match self {
                Self::Q8 => {
                    for (byte, code) in of_codes.iter_mut().zip(codes) {
                        *byte = code ^ 128;
                    }
                }
                Self::Q4 => {
                    let (low, high) = codes.split_at(COLUMNS / 2);
                    for (byte, (low, high)) in of_codes.iter_mut().zip(low.iter().zip(high)) {
                        *byte = low | high << 4;
                    }
                }
            }
        }
        are_numbers
    }

    /// Writes the codes of a block's elements and returns the block's scale.
    fn codes(self, numbers: &[f32], codes: &mut [u8]) -> f16 {
        let scale = match self {
            Self::Q8 => q8(numbers, codes),
            Self::Q4 => q4(numbers, codes),
        };
        let is_finite = numbers.iter().all(|number| number.is_finite());
        if is_finite { scale } else { f16::NAN }
    }
}

/// Returns the reciprocal of a scale, or 0 for a scale of 0. As in ggml, the argument is the f32 scale, not the scale
/// rounded to f16.
fn inverse(scale: f32) -> f32 {
    match scale {
        0.0 => 0.0,
        scale => 1.0 / scale,
    }
}

fn q8(numbers: &[f32], codes: &mut [u8]) -> f16 {
    let largest = numbers.iter().fold(0f32, |most, x| most.max(x.abs()));
    let scale = largest / 127.0;
    let inverse = inverse(scale);
    for (code, number) in codes.iter_mut().zip(numbers) {
        *code = ((number * inverse).round() as i8) as u8 ^ 128;
    }
    f16::from_f32(scale)
}

/// Quantizes a block to 4-bit codes. The element with the largest absolute value gets the code 0. A code `q` stands for
/// `q - 8` times the scale.
fn q4(numbers: &[f32], codes: &mut [u8]) -> f16 {
    let largest = numbers.iter().fold(
        0f32,
        |most: f32, x| {
            if x.abs() > most.abs() { *x } else { most }
        },
    );
    let scale = largest / -8.0;
    let inverse = inverse(scale);
    for (code, number) in codes.iter_mut().zip(numbers) {
        // Round `number * inverse` to f32 before 8.5 is added, as in llama.cpp's reference implementation. This
        // rounding decides the code of an element halfway between two codes.
        *code = ((number * inverse + 8.5) as u8).min(15);
    }
    f16::from_f32(scale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    /// Checks that an element halfway between two codes gets the code that llama.cpp's `quantize_row_q4_0_ref` computes
    /// in f32. Without the rounding of `number * inverse`, the second element would get the code 3 instead of 4.
    #[test]
    fn write_of_numbers_halfway_between_codes_rounds_as_llama_cpp() {
        let mut numbers = [0f32; COLUMNS];
        [numbers[0], numbers[1]] = [-1.75, -0.984375];
        let mut bytes = [0; 18];
        assert!(QuantTarget::Q4.write(&numbers, &mut bytes));
        assert_eq!(bytes[..2], f16::from_f32(0.21875).to_le_bytes());
        assert_eq!([bytes[2] & 15, bytes[3] & 15, bytes[4]], [0, 4, 0x88]);
    }

    /// Checks the quantized blocks and their packed words bit by bit, against the Python package `gguf`.
    #[test]
    fn pack_and_write_equal_blocks_of_gguf_package() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gguf");
        let file =
            std::fs::read(format!("{folder}/quantized.safetensors")).expect("the fixture exists");
        let file = SafeTensors::deserialize(&file).expect("the fixture is valid safetensors");
        let numbers = file.tensor("numbers").expect("numbers");
        let [rows, columns] = numbers.shape()[..] else {
            panic!("the numbers are a matrix")
        };
        let bytes = numbers.data().as_chunks().0;
        let numbers: Vec<f32> = bytes
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        for (target, format, name) in [
            (QuantTarget::Q8, BlockFormat::Q8_0, "Q8_0.blocks"),
            (QuantTarget::Q4, BlockFormat::Q4_0, "Q4_0.blocks"),
        ] {
            let blocks = file.tensor(name).expect(name);
            let of_row = blocks.data().len() / rows;
            let layout = target
                .layout(columns)
                .expect("the columns are whole blocks");
            for row in 0..rows {
                let mut found = vec![0; layout.words()];
                target.pack(layout, &numbers[row * columns..][..columns], &mut found);
                let mut expected = vec![0; layout.words()];
                let blocks = &blocks.data()[row * of_row..][..of_row];
                format.pack(layout, blocks, &mut expected);
                assert_eq!(found, expected, "{name}, row {row}");
                let mut found = vec![0; of_row];
                assert!(target.write(&numbers[row * columns..][..columns], &mut found));
                assert_eq!(found, blocks, "{name}, row {row}");
            }
        }
        assert_eq!(QuantTarget::Q4.layout(48), None);
    }

    /// Checks that a NaN or an infinity makes all elements of its block NaN, so that the error stays visible.
    #[test]
    fn pack_of_nonfinite_numbers_gives_nan_block() {
        for target in [QuantTarget::Q8, QuantTarget::Q4] {
            let layout = target.layout(64).expect("the columns are whole blocks");
            for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut numbers = [0.5; 64];
                numbers[40] = broken;
                let mut words = vec![0; layout.words()];
                target.pack(layout, &numbers, &mut words);
                let mut found = [0.0; 64];
                layout.dequantize(&words, &mut found);
                assert!(found[..32].iter().all(|x| x.is_finite()), "{target:?}");
                assert!(found[32..].iter().all(|x| x.is_nan()), "{target:?}");
                let mut bytes = [0; 68];
                assert!(!target.write(&numbers, &mut bytes[..2 * target.format().bytes()]));
            }
        }
    }
}
