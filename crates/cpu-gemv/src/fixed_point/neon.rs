//! Input rows in fixed point, for the kernels of [`fixed::neon`](crate::fixed).

use super::{BLOCK, LIMB_OFFSET, Unit};
use crate::input::Rows;
use std::arch::aarch64::*;

/// The number of blocks that a kernel multiplies in one step.
pub(crate) const STEP: usize = 4;

/// The order of the limbs in memory, and whether a kernel reads sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    /// True if two rows alternate after each 8 bytes.
    pub in_pairs: bool,
    /// True if the limbs of even columns come before the limbs of odd columns. False if the limbs are in the order of
    /// the columns.
    pub is_interleaved: bool,
    /// True if the format has minimums.
    pub has_sums: bool,
}

/// Input rows in fixed point. The number of blocks is a multiple of [`STEP`]. Blocks beyond the last column are zero.
#[derive(Default)]
pub(crate) struct Fixed {
    /// The limbs: `[blocks, rows, 3 limbs, 32]`. If rows are in pairs: `[blocks, pairs, 3 limbs, 4, 2 rows, 8]`.
    pub limbs: Vec<i8>,
    /// The unit of each block times 65536: `[blocks, rows]`.
    pub units: Vec<f32>,
    /// The sum of each block's elements: `[rows, blocks]`, or `[blocks, rows]` if rows are in pairs. The list is empty
    /// if the format has no minimums.
    pub sums: Vec<f32>,
    /// The number of blocks.
    pub blocks: usize,
}

impl Fixed {
    /// Converts `input`, `[input rows, columns]`, for a kernel that reads `rows` rows. If `input` has fewer rows, the
    /// remaining rows are zero. The columns must be whole blocks.
    pub fn new(input: Rows, columns: usize, rows: usize, form: Form) -> Self {
        let blocks = (columns / BLOCK).next_multiple_of(STEP);
        let mut fixed = Self {
            limbs: vec![0; blocks * rows * 3 * BLOCK],
            units: vec![0.0; blocks * rows],
            sums: vec![0.0; if form.has_sums { blocks * rows } else { 0 }],
            blocks,
        };
        let mut numbers = [0.0; BLOCK];
        for index in 0..input.len() / BLOCK {
            match input {
                Rows::F32(input) => numbers.copy_from_slice(&input[index * BLOCK..][..BLOCK]),
                Rows::Bf16(input) => {
                    for (number, half) in numbers.iter_mut().zip(&input[index * BLOCK..]) {
                        *number = f32::from_bits(u32::from(half.to_bits()) << 16);
                    }
                }
            }
            let (row, block) = (index / (columns / BLOCK), index % (columns / BLOCK));
            let (limbs, unit) = split(&numbers, form.is_interleaved);
            let first = match form.in_pairs {
                true => (block * rows + row / 2 * 2) * 3 * BLOCK + row % 2 * 8,
                false => (block * rows + row) * 3 * BLOCK,
            };
            for (limb, limbs) in limbs.as_chunks::<8>().0.iter().enumerate() {
                let stride = if form.in_pairs { 16 } else { 8 };
                fixed.limbs[first + limb * stride..][..8].copy_from_slice(limbs);
            }
            fixed.units[block * rows + row] = unit;
            if form.has_sums {
                let at = match form.in_pairs {
                    true => block * rows + row,
                    false => row * blocks + block,
                };
                fixed.sums[at] = sum(&numbers);
            }
        }
        fixed
    }
}

/// Returns the three limbs of each element of a block, and the unit times 65536.
fn split(numbers: &[f32; BLOCK], is_interleaved: bool) -> ([i8; 3 * BLOCK], f32) {
    let size = |number: f32| number.to_bits() & 0x7fff_ffff;
    let largest = numbers
        .iter()
        .fold(0, |most, number| most.max(size(*number)));
    let unit = Unit::of(largest);
    let mut limbs = [0; 3 * BLOCK];
    // SAFETY: each load is of four elements within the block, and each store is of 16 bytes within the limbs.
    unsafe {
        let offset = vdupq_n_s32(LIMB_OFFSET);
        let integers: [int32x4_t; 8] = std::array::from_fn(|index| {
            let numbers = vmulq_n_f32(vld1q_f32(numbers.as_ptr().add(4 * index)), unit.reciprocal);
            vaddq_s32(vcvtnq_s32_f32(numbers), offset)
        });
        for half in 0..2 {
            let four: [int16x8_t; 4] = std::array::from_fn(|index| {
                vreinterpretq_s16_s32(match (is_interleaved, half) {
                    (false, _) => integers[4 * half + index],
                    (true, 0) => vuzp1q_s32(integers[2 * index], integers[2 * index + 1]),
                    (true, _) => vuzp2q_s32(integers[2 * index], integers[2 * index + 1]),
                })
            });
            let low = [vuzp1q_s16(four[0], four[1]), vuzp1q_s16(four[2], four[3])];
            let high = [vuzp2q_s16(four[0], four[1]), vuzp2q_s16(four[2], four[3])];
            let [low, high] =
                [low, high].map(|halves| halves.map(|half| vreinterpretq_u8_s16(half)));
            let bytes = [
                vuzp1q_u8(high[0], high[1]),
                vuzp2q_u8(low[0], low[1]),
                vuzp1q_u8(low[0], low[1]),
            ];
            for (limb, bytes) in bytes.into_iter().enumerate() {
                let limb = limbs.as_mut_ptr().add(limb * BLOCK + half * BLOCK / 2);
                vst1q_s8(limb, vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(0x80))));
            }
        }
    }
    (limbs, unit.times_65536)
}

/// Returns the sum of the elements of a block.
fn sum(numbers: &[f32; BLOCK]) -> f32 {
    let mut sums = [0.0; 8];
    for numbers in numbers.as_chunks::<8>().0 {
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum += number;
        }
    }
    let [a, b, c, d, e, f, g, h] = sums;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the integer of a column from its three limbs.
    fn integer(limbs: &[i8; 3 * BLOCK], at: usize) -> i64 {
        [0, 1, 2].iter().fold(0, |integer, limb| {
            256 * integer + i64::from(limbs[limb * BLOCK + at])
        })
    }

    #[test]
    fn split_of_any_block_is_within_half_a_unit() {
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            state >> 8
        };
        for case in 0..2000 {
            // Blocks whose largest element is next to the largest number of limbs, and blocks of all sizes.
            let size = f32::from_bits((23 + random() % 230) << 23);
            let mut numbers = [0.0; BLOCK];
            for number in &mut numbers {
                *number = ((random() >> 8) as f32 / 32768.0 - 1.0) * size;
            }
            numbers[case % BLOCK] =
                size * (1.0 + (0x7f_0000 + random() % 0xffff) as f32 / 8_388_608.0);
            let largest = numbers
                .iter()
                .fold(0.0f64, |most, x| most.max(f64::from(x.abs())));
            for is_interleaved in [false, true] {
                let (limbs, unit) = split(&numbers, is_interleaved);
                let unit = f64::from(unit) / 65536.0;
                assert!(
                    unit * 4_177_855.0 <= largest,
                    "unit {unit}, largest {largest}"
                );
                for (at, number) in numbers.iter().enumerate() {
                    let at = match is_interleaved {
                        true => at / 2 + at % 2 * BLOCK / 2,
                        false => at,
                    };
                    let found = integer(&limbs, at) as f64 * unit;
                    assert!(
                        (found - f64::from(*number)).abs() <= unit / 2.0,
                        "found {found}, expected {number}"
                    );
                }
            }
        }
    }

    #[test]
    fn split_of_zeros_and_of_subnormal_numbers_is_zero() {
        for number in [0.0, -0.0, f32::from_bits(1)] {
            let (limbs, unit) = split(&[number; BLOCK], true);
            assert_eq!(limbs, [0; 3 * BLOCK]);
            assert!(unit > 0.0);
        }
    }

    #[test]
    fn split_with_an_element_that_is_not_finite_has_no_unit() {
        for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut numbers = [1.0; BLOCK];
            numbers[7] = number;
            assert!(split(&numbers, true).1.is_nan());
        }
    }
}
