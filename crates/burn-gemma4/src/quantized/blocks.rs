//! The block formats of ggml, which GGUF files are written in. A row is blocks of equally many numbers; each has its own scale in f16,
//! and some a smallest number.

use super::super_blocks::{q4_k, q5_k, q6_k};
use burn::tensor::f16;

/// A block format, by ggml's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockFormat {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

/// What a block is made of.
struct Layout {
    /// Numbers in a block.
    numbers: usize,
    /// Bytes of a block.
    bytes: usize,
    /// Writes a block's numbers.
    dequantize: fn(&[u8], &mut [f32]),
}

impl Layout {
    const fn new(numbers: usize, bytes: usize, dequantize: fn(&[u8], &mut [f32])) -> Self {
        Self {
            numbers,
            bytes,
            dequantize,
        }
    }
}

impl BlockFormat {
    const fn layout(self) -> Layout {
        match self {
            Self::Q4_0 => Layout::new(32, 2 + 16, q4_0),
            Self::Q4_1 => Layout::new(32, 4 + 16, q4_1),
            Self::Q5_0 => Layout::new(32, 2 + 4 + 16, q5_0),
            Self::Q5_1 => Layout::new(32, 4 + 4 + 16, q5_1),
            Self::Q8_0 => Layout::new(32, 2 + 32, q8_0),
            Self::Q4K => Layout::new(256, 4 + 12 + 128, q4_k),
            Self::Q5K => Layout::new(256, 4 + 12 + 32 + 128, q5_k),
            Self::Q6K => Layout::new(256, 128 + 64 + 16 + 2, q6_k),
        }
    }

    /// Numbers in a block: rows are of a multiple of it.
    pub const fn numbers(self) -> usize {
        self.layout().numbers
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        self.layout().bytes
    }

    /// Writes the numbers of whole blocks, one after the other.
    pub fn dequantize(self, blocks: &[u8], values: &mut [f32]) {
        let Layout {
            numbers,
            bytes,
            dequantize,
        } = self.layout();
        for (block, values) in blocks
            .chunks_exact(bytes)
            .zip(values.chunks_exact_mut(numbers))
        {
            dequantize(block, values);
        }
    }
}

/// The f16 at the beginning of `bytes`.
pub(super) fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// The numbers of 4 bits: of each byte the low ones in the block's first half, the high ones in its second.
pub(super) fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    let low = bytes.iter().map(|byte| byte & 15);
    low.chain(bytes.iter().map(|byte| byte >> 4))
}

/// The numbers of 5 bits: the fifth ones are apart, in the order of the numbers.
pub(super) fn five_bits<'a>(
    fifth: &'a [u8],
    nibbles_of: &'a [u8],
) -> impl Iterator<Item = u8> + 'a {
    nibbles(nibbles_of)
        .enumerate()
        .map(|(index, nibble)| nibble | (fifth[index / 8] >> (index % 8) & 1) << 4)
}

fn q4_0(block: &[u8], values: &mut [f32]) {
    let scale = half(block);
    for (value, q) in values.iter_mut().zip(nibbles(&block[2..])) {
        *value = scale * f32::from(q as i8 - 8);
    }
}

fn q4_1(block: &[u8], values: &mut [f32]) {
    let (scale, least) = (half(block), half(&block[2..]));
    for (value, q) in values.iter_mut().zip(nibbles(&block[4..])) {
        *value = scale * f32::from(q) + least;
    }
}

fn q5_0(block: &[u8], values: &mut [f32]) {
    let scale = half(block);
    for (value, q) in values.iter_mut().zip(five_bits(&block[2..6], &block[6..])) {
        *value = scale * f32::from(q as i8 - 16);
    }
}

fn q5_1(block: &[u8], values: &mut [f32]) {
    let (scale, least) = (half(block), half(&block[2..]));
    for (value, q) in values.iter_mut().zip(five_bits(&block[4..8], &block[8..])) {
        *value = scale * f32::from(q) + least;
    }
}

fn q8_0(block: &[u8], values: &mut [f32]) {
    let scale = half(block);
    for (value, q) in values.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(*q as i8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    /// Random blocks, against what the Python package `gguf` makes of them: the same bits.
    #[test]
    fn numbers_are_those_of_the_formats_own_package() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gguf");
        let file = std::fs::read(format!("{folder}/blocks.safetensors")).expect("a fixture");
        let file = SafeTensors::deserialize(&file).expect("safetensors");
        for (format, name) in [
            (BlockFormat::Q4_0, "Q4_0"),
            (BlockFormat::Q4_1, "Q4_1"),
            (BlockFormat::Q5_0, "Q5_0"),
            (BlockFormat::Q5_1, "Q5_1"),
            (BlockFormat::Q8_0, "Q8_0"),
            (BlockFormat::Q4K, "Q4_K"),
            (BlockFormat::Q5K, "Q5_K"),
            (BlockFormat::Q6K, "Q6_K"),
        ] {
            let tensor = |what| file.tensor(&format!("{name}.{what}")).expect(name);
            let blocks = tensor("blocks");
            assert_eq!(blocks.shape()[1], format.bytes(), "{name}");
            let mut found = vec![0.0; blocks.shape()[0] * format.numbers()];
            format.dequantize(blocks.data(), &mut found);
            let found: Vec<u32> = found.into_iter().map(f32::to_bits).collect();
            let expected: Vec<u32> = tensor("numbers")
                .data()
                .as_chunks::<4>()
                .0
                .iter()
                .map(|bytes| u32::from_le_bytes(*bytes))
                .collect();
            assert_eq!(found, expected, "{name}");
        }
    }
}
