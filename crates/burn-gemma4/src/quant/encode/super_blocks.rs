//! Quantizes to ggml's K formats with a minimum per group: Q2_K, Q4_K and Q5_K. [`super_blocks`] and
//! [`small_super_blocks`] describe the blocks.
//!
//! [`super_blocks`]: crate::quant::super_blocks
//! [`small_super_blocks`]: crate::quant::small_super_blocks

use super::search::{Steps, nearest, positive};
use super::symmetric_super_blocks::pack_two_bits;
use super::{SUPER_BLOCK, importance_of_block, mean_square, stored_half};

/// The groups of a block, each with a scale and a minimum, and the codes of all elements.
struct Groups<const COUNT: usize> {
    /// The scales of the groups as integers.
    scales: [u8; COUNT],
    /// The minimums of the groups as integers.
    least: [u8; COUNT],
    /// The f16 scales that multiply the integers in `scales` and in `least`.
    halves: [[u8; 2]; 2],
    codes: [u8; SUPER_BLOCK],
    /// True if both f16 scales are finite.
    is_valid: bool,
}

/// The sizes of a format and the constants of its search.
struct Search {
    block_bytes: usize,
    /// The position of the two f16 scales in a block.
    halves_at: usize,
    /// The largest code of an element.
    limit: i32,
    /// The largest integer that stores the scale or the minimum of a group.
    integer_limit: i32,
    /// The scales to try without an importance matrix.
    steps: Steps,
    /// True if the root of a group's mean square is added to the weights without an importance matrix.
    adds_mean: bool,
    /// The factor of a block's mean square in the weights with an importance matrix.
    variance_factor: f32,
}

const Q4_K: Search = Search {
    block_bytes: 4 + 12 + 128,
    halves_at: 0,
    limit: 15,
    integer_limit: 63,
    steps: Steps::new(-1.0, 0.1, 20),
    adds_mean: true,
    variance_factor: 2.0,
};
const Q5_K: Search = Search {
    block_bytes: 4 + 12 + 32 + 128,
    limit: 31,
    steps: Steps::new(-0.5, 0.1, 15),
    ..Q4_K
};
const Q2_K: Search = Search {
    block_bytes: 16 + 64 + 4,
    halves_at: 16 + 64,
    limit: 3,
    integer_limit: 15,
    steps: Steps::new(-0.5, 0.1, 15).of_absolute_differences(),
    adds_mean: false,
    variance_factor: 1.0,
};

impl Search {
    /// Quantizes the elements of a block. `importance` has one weight per element.
    fn groups<const COUNT: usize>(
        &self,
        numbers: &[f32],
        importance: Option<&[f32]>,
    ) -> Groups<COUNT> {
        let size = SUPER_BLOCK / COUNT;
        let mut codes = [0; SUPER_BLOCK];
        let (mut scales, mut least, mut sums) = ([0f32; COUNT], [0f32; COUNT], [0f32; COUNT]);
        let weights = self.weights(numbers, importance, size);
        let steps = match importance {
            Some(_) => Steps::WEIGHTED,
            None => self.steps,
        };
        let groups = numbers.chunks_exact(size).zip(weights.chunks_exact(size));
        let groups = groups.zip(codes.chunks_exact_mut(size));
        for (group, ((numbers, weights), codes)) in groups.enumerate() {
            for weight in weights {
                sums[group] += weight;
            }
            (scales[group], least[group]) =
                steps.scale_and_least(numbers, self.limit, weights, codes);
        }
        let limit = self.integer_limit;
        let sums = importance.map(|_| &sums);
        let (scale_factor, scales) = integers(&scales, limit, sums);
        let (least_factor, least) = integers(&least, limit, sums);
        let (scale_bytes, scale) = stored_half(scale_factor);
        let (least_bytes, minimum) = stored_half(least_factor);
        let groups = numbers.chunks_exact(size).zip(codes.chunks_exact_mut(size));
        for (group, (numbers, codes)) in groups.enumerate() {
            let scale = scale * f32::from(scales[group]);
            // The codes of the search stay if the scale is zero, as in ggml.
            if scale != 0.0 {
                let minimum = minimum * f32::from(least[group]);
                for (written, number) in codes.iter_mut().zip(numbers) {
                    let code = nearest((number + minimum) / scale);
                    *written = code.clamp(0, self.limit) as u8;
                }
            }
        }
        Groups {
            scales,
            least,
            halves: [scale_bytes, least_bytes],
            codes,
            is_valid: scale.is_finite() && minimum.is_finite(),
        }
    }

    /// Returns the weights of the errors of a block's elements. `size` is the number of elements per group.
    fn weights(
        &self,
        numbers: &[f32],
        importance: Option<&[f32]>,
        size: usize,
    ) -> [f32; SUPER_BLOCK] {
        let mut weights = [0f32; SUPER_BLOCK];
        if let Some(importance) = importance {
            let variance = mean_square(numbers, self.variance_factor);
            for ((weight, number), factor) in weights.iter_mut().zip(numbers).zip(importance) {
                *weight = factor * (variance + number * number).sqrt();
            }
            return weights;
        }
        let groups = numbers
            .chunks_exact(size)
            .zip(weights.chunks_exact_mut(size));
        for (numbers, weights) in groups {
            let mean = match self.adds_mean {
                true => mean_square(numbers, 1.0).sqrt(),
                false => 0.0,
            };
            for (weight, number) in weights.iter_mut().zip(numbers) {
                *weight = mean + number.abs();
            }
        }
        weights
    }

    /// Quantizes each block of a row. `pack` writes everything but the two f16 scales.
    fn each_block<const COUNT: usize>(
        &self,
        numbers: &[f32],
        importance: Option<&[f32]>,
        blocks: &mut [u8],
        pack: impl Fn(Groups<COUNT>, &mut [u8]),
    ) -> bool {
        let mut is_valid = true;
        let numbers = numbers.chunks_exact(SUPER_BLOCK);
        let blocks = blocks.chunks_exact_mut(self.block_bytes);
        for (index, (numbers, block)) in numbers.zip(blocks).enumerate() {
            let importance = importance_of_block(importance, index, SUPER_BLOCK);
            let groups = self.groups(numbers, importance);
            is_valid &= groups.is_valid;
            block[self.halves_at..][..4].copy_from_slice(groups.halves.as_flattened());
            pack(groups, block);
        }
        is_valid
    }
}

/// Rounds the scales or the minimums of the groups to integers from 0 to `limit`. `weights` are given with an importance
/// matrix. Returns the factor of the integers, and the integers.
fn integers<const COUNT: usize>(
    numbers: &[f32; COUNT],
    limit: i32,
    weights: Option<&[f32; COUNT]>,
) -> (f32, [u8; COUNT]) {
    if let Some(weights) = weights {
        let mut codes = [0; COUNT];
        let factor = positive(numbers, limit, weights, &mut codes);
        return (factor, codes);
    }
    let mut most = 0f32;
    for number in numbers {
        if *number > most {
            most = *number;
        }
    }
    let inverse = match most > 0.0 {
        true => limit as f32 / most,
        false => 0.0,
    };
    let integer = |number: f32| (nearest(inverse * number) as u8).min(limit as u8);
    (most / limit as f32, numbers.map(integer))
}

/// Packs the scales and minimums of 8 groups into 12 bytes of 6-bit integers. See
/// [`scales_and_least`](crate::quant::super_blocks::scales_and_least).
fn pack_six_bits(scales: &[u8; 8], least: &[u8; 8], bytes: &mut [u8]) {
    for group in 0..4 {
        bytes[group] = scales[group] | (scales[group + 4] >> 4) << 6;
        bytes[group + 4] = least[group] | (least[group + 4] >> 4) << 6;
        bytes[group + 8] = scales[group + 4] & 15 | (least[group + 4] & 15) << 4;
    }
}

/// Writes the low 4 bits of all codes. Each 32 bytes hold two groups of 32 elements.
fn pack_nibbles(codes: &[u8; SUPER_BLOCK], bytes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact_mut(32).zip(codes.chunks_exact(64)) {
        let (low, high) = codes.split_at(32);
        for (byte, (low, high)) in bytes.iter_mut().zip(low.iter().zip(high)) {
            *byte = low & 15 | high << 4;
        }
    }
}

/// Quantizes a row to Q4_K. Returns true if all scales fit into f16.
pub(super) fn q4_k(numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    Q4_K.each_block(numbers, importance, blocks, |groups, block| {
        pack_six_bits(&groups.scales, &groups.least, &mut block[4..16]);
        pack_nibbles(&groups.codes, &mut block[16..]);
    })
}

/// Quantizes a row to Q5_K. Returns true if all scales fit into f16.
pub(super) fn q5_k(numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    Q5_K.each_block(numbers, importance, blocks, |groups, block| {
        pack_six_bits(&groups.scales, &groups.least, &mut block[4..16]);
        let (fifth, nibbles) = block[16..].split_at_mut(32);
        fifth.fill(0);
        for (group, codes) in groups.codes.chunks_exact(32).enumerate() {
            for (byte, code) in fifth.iter_mut().zip(codes) {
                *byte |= (code >> 4) << group;
            }
        }
        pack_nibbles(&groups.codes, nibbles);
    })
}

/// Quantizes a row to Q2_K. Returns true if all scales fit into f16.
pub(super) fn q2_k(numbers: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) -> bool {
    let pack = |groups: Groups<16>, block: &mut [u8]| {
        let integers = groups.scales.iter().zip(groups.least);
        for (byte, (scale, least)) in block.iter_mut().zip(integers) {
            *byte = scale | least << 4;
        }
        pack_two_bits(&groups.codes, &mut block[16..80]);
    };
    Q2_K.each_block(numbers, importance, blocks, pack)
}
