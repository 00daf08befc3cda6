//! Whole weights into blocks, by ggml's definitions: of each number the nearest code under the scale that the block's largest one gives.

use super::{blocks::BlockFormat, layout::Layout, pack::Row};
use burn::tensor::f16;

/// Numbers of a block.
const COLUMNS: usize = 32;

/// Into which blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Codes of 8 bits, by the definition of Q8_0.
    Q8,
    /// Codes of 4 bits, by the definition of Q4_0.
    Q4,
}

impl Target {
    /// The blocks, by their name in GGUF files.
    pub fn format(self) -> BlockFormat {
        match self {
            Self::Q8 => BlockFormat::Q8_0,
            Self::Q4 => BlockFormat::Q4_0,
        }
    }

    /// The layout of rows of so many columns; nothing where they are no whole blocks.
    pub fn layout(self, columns: usize) -> Option<Layout> {
        self.format().words(columns)
    }

    /// Writes a row into `words`, which are all zero. A block with something that is no finite number is none at all: its largest one may
    /// not be what it seems.
    pub fn pack(self, layout: Layout, numbers: &[f32], words: &mut [u32]) {
        let mut row = Row { layout, words };
        let mut codes = [0; COLUMNS];
        for (block, numbers) in numbers.chunks_exact(COLUMNS).enumerate() {
            let scale = self.codes(numbers, &mut codes);
            row.codes(block * COLUMNS, &codes);
            row.half(block, scale.to_bits());
        }
    }

    /// Writes a row as GGUF files have it, and says whether it is numbers: finite ones, with scales that f16 holds.
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

    /// Writes a block's codes, and gives its scale.
    fn codes(self, numbers: &[f32], codes: &mut [u8]) -> f16 {
        let scale = match self {
            Self::Q8 => q8(numbers, codes),
            Self::Q4 => q4(numbers, codes),
        };
        let is_finite = numbers.iter().all(|number| number.is_finite());
        if is_finite { scale } else { f16::NAN }
    }
}

/// ggml's inverse of a scale: in f32, before the scale is rounded.
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

/// The largest number has the code 0, which is -8.
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
        // As llama.cpp's reference: the product is rounded before the sum, which decides between the codes of a number halfway between.
        *code = ((number * inverse + 8.5) as u8).min(15);
    }
    f16::from_f32(scale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    /// As llama.cpp's `quantize_row_q4_0_ref` has it in f32; of the exact product the second number's code would be 3.
    #[test]
    fn numbers_halfway_between_codes_are_llama_cpps() {
        let mut numbers = [0f32; COLUMNS];
        [numbers[0], numbers[1]] = [-1.75, -0.984375];
        let mut bytes = [0; 18];
        assert!(Target::Q4.write(&numbers, &mut bytes));
        assert_eq!(bytes[..2], f16::from_f32(0.21875).to_le_bytes());
        assert_eq!([bytes[2] & 15, bytes[3] & 15, bytes[4]], [0, 4, 0x88]);
    }

    /// Against the Python package `gguf`: the same blocks, so that the same words.
    #[test]
    fn blocks_are_those_of_the_formats_own_package() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gguf");
        let file = std::fs::read(format!("{folder}/quantized.safetensors")).expect("a fixture");
        let file = SafeTensors::deserialize(&file).expect("safetensors");
        let numbers = file.tensor("numbers").expect("numbers");
        let [rows, columns] = numbers.shape()[..] else {
            panic!("a matrix")
        };
        let bytes = numbers.data().as_chunks().0;
        let numbers: Vec<f32> = bytes
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        for (target, format, name) in [
            (Target::Q8, BlockFormat::Q8_0, "Q8_0.blocks"),
            (Target::Q4, BlockFormat::Q4_0, "Q4_0.blocks"),
        ] {
            let blocks = file.tensor(name).expect(name);
            let of_row = blocks.data().len() / rows;
            let layout = target.layout(columns).expect("whole blocks");
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
        assert_eq!(Target::Q4.layout(48), None);
    }

    /// ggml's programs refuse such weights; here they are as visible as in whole ones.
    #[test]
    fn what_is_no_number_stays_none() {
        for target in [Target::Q8, Target::Q4] {
            let layout = target.layout(64).expect("whole blocks");
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
