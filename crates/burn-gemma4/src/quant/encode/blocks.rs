//! Quantizes to ggml's formats with blocks of 32 elements: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.

use super::search::{Steps, symmetric};
use super::{importance_of_block, mean_square, stored_half};
use crate::quant::quantize::QuantTarget;

/// The number of elements per block.
const BLOCK: usize = 32;

/// Quantizes a row to Q8_0. As in ggml, an importance matrix changes nothing.
pub(super) fn q8_0(numbers: &[f32], _importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    QuantTarget::Q8.write(numbers, blocks)
}

/// Quantizes a row to Q4_0. Returns true if all scales fit into f16.
pub(super) fn q4_0(numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    match importance {
        None => QuantTarget::Q4.write(numbers, blocks),
        Some(_) => without_least(numbers, importance, blocks, 8, 2 + 16),
    }
}

/// Quantizes a row to Q5_0. Returns true if all scales fit into f16.
pub(super) fn q5_0(numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    without_least(numbers, importance, blocks, 16, 2 + 4 + 16)
}

/// Quantizes a row to Q4_1. Returns true if all scales fit into f16.
pub(super) fn q4_1(numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    with_least(numbers, importance, blocks, 15, 4 + 16)
}

/// Quantizes a row to Q5_1. Returns true if all scales fit into f16.
pub(super) fn q5_1(numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    with_least(numbers, importance, blocks, 31, 4 + 4 + 16)
}

/// Quantizes a row to codes from 0 to `2 · limit - 1` with the zero point `limit`.
fn without_least(
    numbers: &[f32],
    importance: Option<&[f32]>,
    blocks: &mut [u8],
    limit: i32,
    block_bytes: usize,
) -> bool {
    let mut is_valid = true;
    let variance = importance.map_or(0.0, |_| mean_square(numbers, 1.0));
    let rows = numbers.chunks_exact(BLOCK);
    for (index, (numbers, block)) in rows.zip(blocks.chunks_exact_mut(block_bytes)).enumerate() {
        let mut codes = [0; BLOCK];
        let scale = match importance_of_block(importance, index, BLOCK) {
            Some(importance) => {
                let weights = weights(numbers, importance, variance);
                symmetric(numbers, limit, &weights, &mut codes)
            }
            None => nearest_to_largest(numbers, limit, &mut codes),
        };
        let (bytes, scale) = stored_half(scale);
        is_valid &= scale.is_finite();
        let (header, rest) = block.split_at_mut(2);
        header.copy_from_slice(&bytes);
        pack(&codes, rest);
    }
    is_valid
}

/// Quantizes a row to codes from 0 to `limit`, with a minimum per block.
fn with_least(
    numbers: &[f32],
    importance: Option<&[f32]>,
    blocks: &mut [u8],
    limit: i32,
    block_bytes: usize,
) -> bool {
    let mut is_valid = true;
    let variance = importance.map_or(0.0, |_| mean_square(numbers, 1.0));
    let rows = numbers.chunks_exact(BLOCK);
    for (index, (numbers, block)) in rows.zip(blocks.chunks_exact_mut(block_bytes)).enumerate() {
        let mut codes = [0; BLOCK];
        let (scale, least) = match importance_of_block(importance, index, BLOCK) {
            Some(importance) => {
                let weights = weights(numbers, importance, variance);
                let steps = Steps::WEIGHTED;
                let (scale, least) = steps.scale_and_least(numbers, limit, &weights, &mut codes);
                (scale, -least)
            }
            None => from_least_to_most(numbers, limit, &mut codes),
        };
        let ((scale_bytes, scale), (least_bytes, least)) = (stored_half(scale), stored_half(least));
        is_valid &= scale.is_finite() && least.is_finite();
        let (header, rest) = block.split_at_mut(4);
        header.copy_from_slice([scale_bytes, least_bytes].as_flattened());
        pack(&codes, rest);
    }
    is_valid
}

/// Returns the weights of a block's elements with an importance matrix. `variance` is the mean square of the row.
fn weights(numbers: &[f32], importance: &[f32], variance: f32) -> [f32; BLOCK] {
    std::array::from_fn(|at| importance[at] * (variance + numbers[at] * numbers[at]).sqrt())
}

/// Returns the scale that gives the element with the largest absolute value the code 0.
fn nearest_to_largest(numbers: &[f32], limit: i32, codes: &mut [u8; BLOCK]) -> f32 {
    let mut largest = 0f32;
    for number in numbers {
        if number.abs() > largest.abs() {
            largest = *number;
        }
    }
    let scale = largest / -(limit as f32);
    let inverse = inverse(scale);
    for (code, number) in codes.iter_mut().zip(numbers) {
        *code = ((number * inverse + (limit as f32 + 0.5)) as u8).min(2 * limit as u8 - 1);
    }
    scale
}

/// Returns the scale and the least element of a block. The largest element gets the code `limit`.
fn from_least_to_most(numbers: &[f32], limit: i32, codes: &mut [u8; BLOCK]) -> (f32, f32) {
    let (mut least, mut most) = (f32::MAX, f32::MIN);
    for number in numbers {
        if *number < least {
            least = *number;
        }
        if *number > most {
            most = *number;
        }
    }
    let scale = (most - least) / limit as f32;
    let inverse = inverse(scale);
    for (code, number) in codes.iter_mut().zip(numbers) {
        *code = (((number - least) * inverse + 0.5) as u8).min(limit as u8);
    }
    (scale, least)
}

fn inverse(scale: f32) -> f32 {
    match scale {
        0.0 => 0.0,
        scale => 1.0 / scale,
    }
}

/// Packs the codes of a block. With 20 bytes, the first 4 hold the fifth bits in the order of the elements. The last 16
/// bytes hold the low 4 bits, those of the block's second half in the high half of each byte.
fn pack(codes: &[u8; BLOCK], bytes: &mut [u8]) {
    let (fifth, nibbles) = bytes.split_at_mut(bytes.len() - BLOCK / 2);
    fifth.fill(0);
    if !fifth.is_empty() {
        for (at, code) in codes.iter().enumerate() {
            fifth[at / 8] |= (code >> 4) << (at % 8);
        }
    }
    let (low, high) = codes.split_at(BLOCK / 2);
    for (byte, (low, high)) in nibbles.iter_mut().zip(low.iter().zip(high)) {
        *byte = low & 15 | high << 4;
    }
}
