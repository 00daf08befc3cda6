//! Quantizes to ggml's K formats without a minimum: Q3_K and Q6_K.

use super::search::{ZERO_BELOW, nearest, refined_symmetric, symmetric};
use super::{SUPER_BLOCK, importance_of_block, mean_square, stored_half};

/// The number of elements per group.
const GROUP: usize = 16;
/// The number of groups per block.
const GROUPS: usize = SUPER_BLOCK / GROUP;

/// Computes the code of each element in the groups with a scale other than zero. The codes of the search stay in the
/// other groups, as in ggml. The written codes are `limit` plus integers from `-limit` to `limit - 1`.
fn requantize(
    numbers: &[f32],
    scale: f32,
    integers: [i32; GROUPS],
    limit: i32,
    codes: &mut [u8; SUPER_BLOCK],
) {
    let groups = numbers
        .chunks_exact(GROUP)
        .zip(codes.chunks_exact_mut(GROUP));
    for ((numbers, codes), integer) in groups.zip(integers) {
        let scale = scale * integer as f32;
        if scale != 0.0 {
            for (written, number) in codes.iter_mut().zip(numbers) {
                let code = nearest(number / scale).clamp(-limit, limit - 1);
                *written = (code + limit) as u8;
            }
        }
    }
}

/// Returns the scale with the largest absolute value, or 0.
fn largest(scales: &[f32; GROUPS]) -> f32 {
    let mut largest = 0f32;
    for scale in scales {
        if scale.abs() > largest.abs() {
            largest = *scale;
        }
    }
    largest
}

/// Writes the lower 2 bits of all codes into 64 bytes. See [`small_super_blocks`](crate::quant::small_super_blocks).
pub(super) fn pack_two_bits(codes: &[u8; SUPER_BLOCK], bytes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact_mut(32).zip(codes.chunks_exact(128)) {
        for (at, byte) in bytes.iter_mut().enumerate() {
            let code = |part: usize| (codes[32 * part + at] & 3) << (2 * part);
            *byte = code(0) | code(1) | code(2) | code(3);
        }
    }
}

/// Quantizes a row to Q3_K. Returns true if all scales fit into f16.
pub(super) fn q3_k(numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    let mut is_valid = true;
    let numbers = numbers.chunks_exact(SUPER_BLOCK);
    for (index, (numbers, block)) in numbers.zip(blocks.chunks_exact_mut(110)).enumerate() {
        let importance = importance_of_block(importance, index, SUPER_BLOCK);
        let mut codes = [0; SUPER_BLOCK];
        let (factor, integers) = q3_k_scales(numbers, importance, &mut codes);
        let (bytes, scale) = stored_half(factor);
        is_valid &= scale.is_finite();
        requantize(numbers, scale, integers, 4, &mut codes);
        block[..32].fill(0);
        for (at, code) in codes.iter().enumerate() {
            block[at % 32] |= (code >> 2) << (at / 32);
        }
        pack_two_bits(&codes, &mut block[32..96]);
        let packed = &mut block[96..108];
        packed.fill(0);
        for (group, integer) in integers.iter().enumerate() {
            let stored = (integer + 32) as u8;
            packed[group % 8] |= (stored & 15) << (group / 8 * 4);
            packed[8 + group % 4] |= (stored >> 4) << (group / 4 * 2);
        }
        block[108..].copy_from_slice(&bytes);
    }
    is_valid
}

/// Finds the scales of a Q3_K block: the factor, and an integer from -32 to 31 for each group.
fn q3_k_scales(
    numbers: &[f32],
    importance: Option<&[f32]>,
    codes: &mut [u8; SUPER_BLOCK],
) -> (f32, [i32; GROUPS]) {
    let mut scales = [0f32; GROUPS];
    let groups = numbers
        .chunks_exact(GROUP)
        .zip(codes.chunks_exact_mut(GROUP));
    let Some(importance) = importance else {
        for (scale, (numbers, codes)) in scales.iter_mut().zip(groups) {
            *scale = refined_symmetric(numbers, 4, codes);
        }
        let largest = largest(&scales);
        if largest == 0.0 {
            return (0.0, [-32; GROUPS]);
        }
        let inverse = -32.0 / largest;
        // ggml narrows the integer to 8 bits before it clamps the integer.
        let integer = |scale: f32| i32::from(nearest(inverse * scale) as i8).clamp(-32, 31);
        return (1.0 / inverse, scales.map(integer));
    };
    let variance = mean_square(numbers, 2.0);
    let mut sums = [0f32; GROUPS];
    let groups = groups.zip(importance.chunks_exact(GROUP));
    for (group, ((numbers, codes), importance)) in groups.enumerate() {
        let mut weights = [0f32; GROUP];
        for ((weight, number), factor) in weights.iter_mut().zip(numbers).zip(importance) {
            *weight = factor * (variance + number * number).sqrt();
            sums[group] += *weight;
        }
        scales[group] = symmetric(numbers, 4, &weights, codes);
    }
    let mut integers = [0; GROUPS];
    let factor = symmetric(&scales, 32, &sums, &mut integers);
    (factor, integers.map(|integer| i32::from(integer) - 32))
}

/// Quantizes a row to Q6_K. Returns true if all scales fit into f16.
pub(super) fn q6_k(numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    let mut is_valid = true;
    let numbers = numbers.chunks_exact(SUPER_BLOCK);
    for (index, (numbers, block)) in numbers.zip(blocks.chunks_exact_mut(210)).enumerate() {
        let importance = importance_of_block(importance, index, SUPER_BLOCK);
        let mut codes = [0; SUPER_BLOCK];
        let mut scales = [0f32; GROUPS];
        let groups = numbers
            .chunks_exact(GROUP)
            .zip(codes.chunks_exact_mut(GROUP));
        for (group, (numbers, codes)) in groups.enumerate() {
            let mut weights = [0f32; GROUP];
            match importance {
                Some(importance) => weights.copy_from_slice(&importance[group * GROUP..][..GROUP]),
                None => {
                    for (weight, number) in weights.iter_mut().zip(numbers) {
                        *weight = number * number;
                    }
                }
            }
            scales[group] = symmetric(numbers, 32, &weights, codes);
        }
        let largest = largest(&scales);
        if largest.abs() < ZERO_BELOW {
            block.fill(0);
            continue;
        }
        let inverse = -128.0 / largest;
        let (bytes, scale) = stored_half(1.0 / inverse);
        is_valid &= scale.is_finite();
        let integers = scales.map(|scale| i32::from(nearest(inverse * scale).min(127) as i8));
        requantize(numbers, scale, integers, 32, &mut codes);
        let (low, rest) = block.split_at_mut(128);
        let (high, rest) = rest.split_at_mut(64);
        let halves = low.chunks_exact_mut(64).zip(high.chunks_exact_mut(32));
        for ((low, high), codes) in halves.zip(codes.chunks_exact(128)) {
            for (at, byte) in low.iter_mut().enumerate() {
                *byte = codes[at] & 15 | codes[at + 64] << 4;
            }
            for (at, byte) in high.iter_mut().enumerate() {
                let code = |part: usize| (codes[32 * part + at] >> 4) << (2 * part);
                *byte = code(0) | code(1) | code(2) | code(3);
            }
        }
        for (byte, integer) in rest.iter_mut().zip(integers) {
            *byte = integer as u8;
        }
        rest[GROUPS..].copy_from_slice(&bytes);
    }
    is_valid
}
