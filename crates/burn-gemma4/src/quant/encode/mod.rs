//! Quantizes rows to ggml's block formats, as llama.cpp's reference quantizers do, bit by bit. An importance matrix
//! weights the errors of a row's elements.

mod blocks;
mod search;
mod super_blocks;
mod symmetric_super_blocks;

use super::blocks::BlockFormat;
use burn::tensor::f16;

/// The number of elements in a block of a K format.
const SUPER_BLOCK: usize = 256;

/// The largest absolute value of an element. No format stores larger elements: the largest is that of Q6_K, a scale of
/// 65,504 times an integer of 128 times a code of 32.
const MOST: f32 = (1 << 28) as f32;
/// A bound on the squares of the codes, times the number of elements in a block.
const SQUARES: f32 = (1 << 21) as f32;

/// Quantizes a row to whole blocks. The second argument is the importance of each element. Returns true if all scales
/// fit into f16.
type Encoder = fn(&[f32], Option<&[f32]>, &mut [u8]) -> bool;

impl BlockFormat {
    /// Returns the quantizer to this format, or `None` if this crate only reads the format.
    fn encoder(self) -> Option<Encoder> {
        match self {
            Self::Q4_0 => Some(blocks::q4_0),
            Self::Q4_1 => Some(blocks::q4_1),
            Self::Q5_0 => Some(blocks::q5_0),
            Self::Q5_1 => Some(blocks::q5_1),
            Self::Q8_0 => Some(blocks::q8_0),
            Self::Q2K => Some(super_blocks::q2_k),
            Self::Q3K => Some(symmetric_super_blocks::q3_k),
            Self::Q4K => Some(super_blocks::q4_k),
            Self::Q5K => Some(super_blocks::q5_k),
            Self::Q6K => Some(symmetric_super_blocks::q6_k),
            Self::Iq4Nl | Self::Iq4Xs | Self::Mxfp4 => None,
        }
    }

    /// Quantizes a row to whole blocks. `importance` has a weight for each element.
    ///
    /// Returns false if an element is not finite, if a scale does not fit into f16, or if a sum of weighted elements
    /// would overflow. In the last case, llama.cpp writes blocks of zeros.
    ///
    /// # Panics
    /// Panics if this crate only reads the format.
    pub fn encode(self, numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
        let encode = self.encoder().expect("this crate writes the format");
        let largest = |values: &[f32]| values.iter().fold(0f32, |most, x| most.max(x.abs()));
        let are_finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
        let most = largest(numbers);
        let has_finite_sums = |importance: &[f32]| {
            let weight = largest(importance) * most.max(1.0);
            are_finite(importance) && (weight * most.max(1.0) * SQUARES).is_finite()
        };
        are_finite(numbers)
            && most <= MOST
            && importance.is_none_or(has_finite_sums)
            && encode(numbers, importance, blocks)
    }
}

/// Returns `factor` times the mean square of the numbers, with the roundings of ggml.
fn mean_square(numbers: &[f32], factor: f32) -> f32 {
    let mut sum = 0f32;
    for number in numbers {
        sum += number * number;
    }
    factor * sum / numbers.len() as f32
}

/// Returns the bytes of a number in f16, and the number that they stand for.
fn stored_half(number: f32) -> ([u8; 2], f32) {
    let half = f16::from_f32(number);
    (half.to_le_bytes(), half.to_f32())
}

/// Returns the importance of the elements of one block of a row.
fn importance_of_block(importance: Option<&[f32]>, block: usize, size: usize) -> Option<&[f32]> {
    importance.map(|importance| &importance[block * size..][..size])
}

#[cfg(test)]
mod tests;
