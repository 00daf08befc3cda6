//! The block formats of ggml in GGUF files. A row consists of blocks of equal size. Each block has a scale, and in some
//! formats also a minimum.

use super::codebooks::{iq4_nl, iq4_xs, mxfp4};
use super::small_super_blocks::{q2_k, q3_k};
use super::super_blocks::{q4_k, q5_k, q6_k};
use burn::tensor::f16;

/// A block format, with the name that ggml gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockFormat {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
}

/// The sizes of a format's blocks, and the function that dequantizes a block.
struct Layout {
    /// The number of elements in a block.
    numbers: usize,
    /// The number of bytes in a block.
    bytes: usize,
    /// Writes the elements of a block in f32.
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
    /// All formats, each with ggml's name.
    #[cfg(test)]
    pub const ALL: [(Self, &str); 13] = [
        (Self::Q4_0, "Q4_0"),
        (Self::Q4_1, "Q4_1"),
        (Self::Q5_0, "Q5_0"),
        (Self::Q5_1, "Q5_1"),
        (Self::Q8_0, "Q8_0"),
        (Self::Q2K, "Q2_K"),
        (Self::Q3K, "Q3_K"),
        (Self::Q4K, "Q4_K"),
        (Self::Q5K, "Q5_K"),
        (Self::Q6K, "Q6_K"),
        (Self::Iq4Nl, "IQ4_NL"),
        (Self::Iq4Xs, "IQ4_XS"),
        (Self::Mxfp4, "MXFP4"),
    ];

    const fn layout(self) -> Layout {
        match self {
            Self::Q4_0 => Layout::new(32, 2 + 16, q4_0),
            Self::Q4_1 => Layout::new(32, 4 + 16, q4_1),
            Self::Q5_0 => Layout::new(32, 2 + 4 + 16, q5_0),
            Self::Q5_1 => Layout::new(32, 4 + 4 + 16, q5_1),
            Self::Q8_0 => Layout::new(32, 2 + 32, q8_0),
            Self::Q2K => Layout::new(256, 16 + 64 + 4, q2_k),
            Self::Q3K => Layout::new(256, 32 + 64 + 12 + 2, q3_k),
            Self::Q4K => Layout::new(256, 4 + 12 + 128, q4_k),
            Self::Q5K => Layout::new(256, 4 + 12 + 32 + 128, q5_k),
            Self::Q6K => Layout::new(256, 128 + 64 + 16 + 2, q6_k),
            Self::Iq4Nl => Layout::new(32, 2 + 16, iq4_nl),
            Self::Iq4Xs => Layout::new(256, 2 + 2 + 4 + 128, iq4_xs),
            Self::Mxfp4 => Layout::new(32, 1 + 16, mxfp4),
        }
    }

    /// Returns the number of elements in a block. The length of a row is a multiple of this number.
    pub const fn numbers(self) -> usize {
        self.layout().numbers
    }

    /// Returns the number of bytes in a block.
    pub const fn bytes(self) -> usize {
        self.layout().bytes
    }

    /// Dequantizes consecutive whole blocks.
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

/// Reads the f16 at the beginning of `bytes`.
pub(super) fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// Returns the 4-bit codes: first the low 4 bits of all bytes, then the high 4 bits of all bytes.
pub(super) fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    let low = bytes.iter().map(|byte| byte & 15);
    low.chain(bytes.iter().map(|byte| byte >> 4))
}

/// Returns the 5-bit codes. `fifth` holds the fifth bit of each code, in the order of the elements.
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

    /// Checks the dequantization of random blocks in every format, bit by bit, against the Python package `gguf`.
    #[test]
    fn dequantize_of_every_format_equals_gguf_package_bitwise() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gguf");
        let file =
            std::fs::read(format!("{folder}/blocks.safetensors")).expect("the fixture exists");
        let file = SafeTensors::deserialize(&file).expect("the fixture is valid safetensors");
        for (format, name) in BlockFormat::ALL {
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
