//! Input rows in fixed point, for the kernels of [`fixed::avx512`](crate::fixed).

use super::{BLOCK, LIMB_OFFSET, Unit};
use crate::input::Rows;
use std::arch::x86_64::*;

/// The number of columns that a kernel multiplies in one step: a vector of 32-bit words with eight 4-bit codes each.
pub(crate) const STEP: usize = 128;
/// The number of lanes of a vector. A lane has the eight columns of a word.
const LANES: usize = 16;
/// The columns of a lane.
const COLUMNS: usize = STEP / LANES;

/// The format of the weights, as far as the input depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    /// The zero point of the codes.
    pub zero: u32,
    /// True if the format has minimums.
    pub has_sums: bool,
}

/// Input rows in fixed point. Columns beyond the last one are zero.
#[derive(Default)]
pub(crate) struct Fixed {
    /// The steps: `[steps, rows]`.
    pub steps: Vec<Step>,
}

/// The columns of one step of an input row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Step {
    /// The limbs of the even columns, and of the odd columns.
    pub limbs: [[[i8; STEP / 2]; 2]; 3],
    /// For each lane, minus the zero point times the sum of the integers. The codes are multiplied before the zero
    /// point is subtracted.
    pub corrections: [i32; LANES],
    /// For each lane, the unit.
    pub units: [f32; LANES],
    /// For each lane, the sum of the elements. It is 0 if the format has no minimums.
    pub sums: [f32; LANES],
}

impl Step {
    const ZERO: Self = Self {
        limbs: [[[0; STEP / 2]; 2]; 3],
        corrections: [0; LANES],
        units: [0.0; LANES],
        sums: [0.0; LANES],
    };
}

impl Fixed {
    /// Converts `input`, `[input rows, columns]`, for a kernel that reads `rows` rows. If `input` has fewer rows, the
    /// remaining rows are zero.
    pub fn new(input: Rows, columns: usize, rows: usize, form: Form) -> Self {
        let mut steps = vec![Step::ZERO; columns.div_ceil(STEP) * rows];
        for row in 0..input.len() / columns {
            let steps = steps[row..].iter_mut().step_by(rows);
            for (index, step) in steps.enumerate() {
                let first = row * columns + index * STEP;
                let count = STEP.min(columns - index * STEP);
                let mut numbers = [0.0; STEP];
                match input {
                    Rows::F32(input) => {
                        numbers[..count].copy_from_slice(&input[first..][..count]);
                    }
                    Rows::Bf16(input) => {
                        for (number, half) in numbers.iter_mut().zip(&input[first..][..count]) {
                            *number = f32::from_bits(u32::from(half.to_bits()) << 16);
                        }
                    }
                }
                // SAFETY: only the kernels for CPUs with AVX-512 read fixed point.
                unsafe { split(&numbers, form, step) };
            }
        }
        Self { steps }
    }
}

/// Writes the columns of a step.
///
/// # Safety
/// The CPU has the instruction set.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn split(numbers: &[f32; STEP], form: Form, step: &mut Step) {
    for (index, block) in numbers.as_chunks::<BLOCK>().0.iter().enumerate() {
        let (first_lane, lanes) = (index * BLOCK / COLUMNS, BLOCK / COLUMNS);
        // SAFETY: each load is of 16 elements of the block, and each store is of 16 bytes within the limbs.
        unsafe {
            let halves = [0, LANES].map(|first| _mm512_loadu_ps(block.as_ptr().add(first)));
            let sizes = halves.map(|half| {
                _mm512_and_si512(_mm512_castps_si512(half), _mm512_set1_epi32(i32::MAX))
            });
            let largest = _mm512_reduce_max_epu32(_mm512_max_epu32(sizes[0], sizes[1]));
            if largest == 0 {
                continue;
            }
            let unit = Unit::of(largest);
            let integers = halves.map(|half| {
                _mm512_cvtps_epi32(_mm512_mul_ps(half, _mm512_set1_ps(unit.reciprocal)))
            });
            let counts =
                _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let of_parity = [0, 1].map(|parity| {
                let columns = _mm512_add_epi32(counts, _mm512_set1_epi32(parity));
                _mm512_permutex2var_epi32(integers[0], columns, integers[1])
            });
            for (parity, integers) in of_parity.into_iter().enumerate() {
                let bytes = _mm512_add_epi32(integers, _mm512_set1_epi32(LIMB_OFFSET));
                let limbs = [
                    _mm512_srli_epi32::<16>(bytes),
                    _mm512_srli_epi32::<8>(bytes),
                    bytes,
                ];
                for (limb, bytes) in limbs.into_iter().enumerate() {
                    let bytes = _mm_xor_si128(_mm512_cvtepi32_epi8(bytes), _mm_set1_epi8(-128));
                    let to = &mut step.limbs[limb][parity][index * BLOCK / 2..][..BLOCK / 2];
                    _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
                }
            }
            let mut of_pairs = [0i32; LANES];
            let pairs = _mm512_add_epi32(of_parity[0], of_parity[1]);
            _mm512_storeu_si512(of_pairs.as_mut_ptr().cast(), pairs);
            let corrections = step.corrections[first_lane..][..lanes].iter_mut();
            for (correction, pairs) in corrections.zip(of_pairs.as_chunks::<4>().0) {
                let sum = pairs
                    .iter()
                    .fold(0, |sum: i32, pair| sum.wrapping_add(*pair));
                *correction = sum.wrapping_mul(-(form.zero as i32));
            }
            step.units[first_lane..][..lanes].fill(unit.times_65536 / 65536.0);
        }
        if form.has_sums {
            let sums = step.sums[first_lane..][..lanes].iter_mut();
            for (sum, numbers) in sums.zip(block.as_chunks::<COLUMNS>().0) {
                let [a, b, c, d, e, f, g, h] = *numbers;
                *sum = ((a + e) + (c + g)) + ((b + f) + (d + h));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_supported() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
    }

    /// Returns the columns of a step.
    fn split_step(numbers: &[f32; STEP]) -> Step {
        let (mut step, form) = (
            Step::ZERO,
            Form {
                zero: 8,
                has_sums: true,
            },
        );
        // SAFETY: each test returns before this call if the CPU lacks the instruction set.
        unsafe { split(numbers, form, &mut step) };
        step
    }

    /// Returns the integer of a column from its three limbs.
    fn integer(step: &Step, column: usize) -> i32 {
        step.limbs.iter().fold(0, |integer, limb| {
            256 * integer + i32::from(limb[column % 2][column / 2])
        })
    }

    #[test]
    fn split_of_any_step_is_within_half_a_unit() {
        if !is_supported() {
            return;
        }
        let mut state = 1u32;
        let mut random = || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            state >> 8
        };
        for _ in 0..500 {
            let mut numbers = [0.0; STEP];
            for block in numbers.as_chunks_mut::<BLOCK>().0 {
                // Blocks of all sizes, whose largest element is next to the largest number of limbs.
                let size = f32::from_bits((23 + random() % 230) << 23);
                for number in block.iter_mut() {
                    *number = ((random() >> 8) as f32 / 32768.0 - 1.0) * size;
                }
                let last = (0x7f_0000 + random() % 0xffff) as f32 / 8_388_608.0;
                block[random() as usize % BLOCK] = size * (1.0 + last);
            }
            let step = split_step(&numbers);
            for (column, number) in numbers.iter().enumerate() {
                let unit = f64::from(step.units[column / COLUMNS]);
                let found = f64::from(integer(&step, column)) * unit;
                let of_block = &numbers[column / BLOCK * BLOCK..][..BLOCK];
                let largest = of_block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                assert!(
                    unit * 4_177_855.0 <= f64::from(largest),
                    "{unit}, {largest}"
                );
                assert!(
                    (found - f64::from(*number)).abs() <= unit / 2.0,
                    "found {found}, expected {number}"
                );
            }
            for lane in 0..LANES {
                let columns = lane * COLUMNS..(lane + 1) * COLUMNS;
                let sum: i32 = columns.clone().map(|column| integer(&step, column)).sum();
                assert_eq!(step.corrections[lane], -8 * sum);
                let sum: f64 = columns
                    .clone()
                    .map(|column| f64::from(numbers[column]))
                    .sum();
                let size: f64 = columns.map(|column| f64::from(numbers[column].abs())).sum();
                assert!((f64::from(step.sums[lane]) - sum).abs() <= 1e-6 * size);
            }
        }
    }

    #[test]
    fn split_of_zeros_and_of_subnormal_numbers_is_zero() {
        if !is_supported() {
            return;
        }
        for number in [0.0, -0.0, f32::from_bits(1)] {
            let step = split_step(&[number; STEP]);
            assert_eq!(step.limbs, [[[0; STEP / 2]; 2]; 3]);
            assert!(step.units.iter().all(|unit| unit.is_finite()));
        }
    }

    #[test]
    fn split_with_an_element_that_is_not_finite_has_no_unit() {
        if !is_supported() {
            return;
        }
        for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut numbers = [1.0; STEP];
            numbers[39] = number;
            let units = split_step(&numbers).units;
            let is_bad = |lane: usize| (4..8).contains(&lane);
            assert!((0..LANES).all(|lane| units[lane].is_nan() == is_bad(lane)));
        }
    }
}
