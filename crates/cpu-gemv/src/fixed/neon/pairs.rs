//! The kernel that multiplies pairs of input rows by pairs of rows of the weights, with the extension I8MM.
//!
//! One `smmla` multiplies two rows of 8 codes by two rows of 8 limbs. The result is a tile of 2 · 2 sums, so the sum
//! over a block needs no reduction.

use super::codes::Codes;
use super::dots::smmla;
use super::{AHEAD, HALF_BLOCKS, Kernels, LEAST, PLAIN, is_interleaved, read_groups};
use crate::fixed_point::{BLOCK, Form};
use crate::input::Reads;
use crate::kernel::{Kernel, Task};
use crate::layout::Layout;
use crate::scales::Groups;
use crate::simd::{Neon, Simd};
use std::{arch::aarch64::*, array::from_fn, ops::Range};

/// The number of rows of the weights that share a load of the input: two pairs.
const SHARED: usize = 4;
const PAIRS: usize = SHARED / 2;

/// Multiplies `P` pairs of input rows by the rows `range` of quantized weights.
///
/// # Safety
/// `range` is within the weights, no other thread computes these outputs, and the CPU has the instruction set. The
/// codes of the layout have the format `C`, and `KIND` is the layout's variant.
#[target_feature(enable = "neon,i8mm")]
unsafe fn multiply<C: Codes, const KIND: u8, const P: usize>(task: &Task, range: Range<usize>) {
    let Some(layout) = task.layout else {
        return;
    };
    let mut groups: [Groups; SHARED] = from_fn(|_| Groups::of_blocks(layout, BLOCK));
    for output in range.clone().step_by(SHARED) {
        // The last row is multiplied several times if the rows are not whole pairs.
        let outputs: [usize; SHARED] = from_fn(|index| (output + index).min(range.end - 1));
        unsafe {
            let weights = outputs.map(|output| task.weights.add(output * task.row_bytes));
            for (groups, weights) in groups.iter_mut().zip(weights) {
                read_groups(groups, layout, weights);
            }
            let totals = totals::<C, KIND, P>(task, layout, weights, &groups);
            for (index, output) in outputs.into_iter().enumerate() {
                for row in 0..task.rows {
                    let mut tile = [0.0; 4];
                    vst1q_f32(tile.as_mut_ptr(), totals[row / 2][index / 2]);
                    let number = tile[index % 2 * 2 + row % 2];
                    *task.output.add(row * task.outputs + output) = number;
                }
            }
        }
    }
}

/// Returns the tiles of the products: `[pairs of input rows][pairs of the weights]`.
#[inline(always)]
unsafe fn totals<C: Codes, const KIND: u8, const P: usize>(
    task: &Task,
    layout: Layout,
    weights: [*const u8; SHARED],
    groups: &[Groups; SHARED],
) -> [[float32x4_t; PAIRS]; P] {
    let input = &task.input.fixed;
    let per_block = if KIND == HALF_BLOCKS { 2 } else { 1 };
    unsafe {
        let mut totals = [[vdupq_n_f32(0.0); PAIRS]; P];
        for block in 0..layout.columns / BLOCK {
            let codes: [[int8x16_t; 4]; PAIRS] = from_fn(|pair| {
                let [first, second]: [[int8x16_t; 2]; 2] = from_fn(|index| {
                    let weights = weights[2 * pair + index];
                    let low = weights.add(block * C::LOW_BYTES);
                    let top = weights.add(4 * layout.top() + block * C::TOP_BYTES);
                    Neon::prefetch(low.wrapping_add(AHEAD));
                    match KIND {
                        LEAST => C::signed::<false>(low, top),
                        _ => C::signed::<true>(low, top),
                    }
                });
                [
                    zip_low(first[0], second[0]),
                    zip_high(first[0], second[0]),
                    zip_low(first[1], second[1]),
                    zip_high(first[1], second[1]),
                ]
            });
            for (pair, totals) in totals.iter_mut().enumerate() {
                let at = block * P + pair;
                let limbs = input.limbs.as_ptr().add(at * 6 * BLOCK);
                let limbs: [[int8x16_t; 4]; 3] = from_fn(|limb| {
                    from_fn(|part| vld1q_s8(limbs.add(limb * 2 * BLOCK + part * 16)))
                });
                let units = vld1_f32(input.units.as_ptr().add(2 * at));
                let units = vcombine_f32(units, units);
                for (shared, total) in totals.iter_mut().enumerate() {
                    let scales = |part: usize| {
                        let at = block * per_block + part;
                        let [first, second] =
                            [0, 1].map(|index| groups[2 * shared + index].scale.as_ptr().add(at));
                        let scales = vcombine_f32(vld1_dup_f32(first), vld1_dup_f32(second));
                        vmulq_f32(scales, units)
                    };
                    let codes = codes[shared];
                    if KIND == HALF_BLOCKS {
                        // In each vector of codes, the first 8 bytes are of the first 16 columns.
                        let even =
                            sum::<C, KIND, 2>([codes[0], codes[2]], limbs.map(|l| [l[0], l[2]]));
                        let odd =
                            sum::<C, KIND, 2>([codes[1], codes[3]], limbs.map(|l| [l[1], l[3]]));
                        *total = vfmaq_f32(*total, even, scales(0));
                        *total = vfmaq_f32(*total, odd, scales(1));
                    } else {
                        *total = vfmaq_f32(*total, sum::<C, KIND, 4>(codes, limbs), scales(0));
                    }
                    if KIND == LEAST {
                        let sums = vld1_f32(input.sums.as_ptr().add(2 * at));
                        let [first, second] = [0, 1]
                            .map(|index| groups[2 * shared + index].least.as_ptr().add(block));
                        let least = vcombine_f32(vld1_dup_f32(first), vld1_dup_f32(second));
                        *total = vfmaq_f32(*total, least, vcombine_f32(sums, sums));
                    }
                }
            }
        }
        totals
    }
}

/// Returns the sums of the products of `N` vectors of codes in units of 65536.
#[inline(always)]
unsafe fn sum<C: Codes, const KIND: u8, const N: usize>(
    codes: [int8x16_t; N],
    limbs: [[int8x16_t; N]; 3],
) -> float32x4_t {
    unsafe {
        let dot = |mut sum: int32x4_t, limbs: [int8x16_t; N]| {
            for (codes, limbs) in codes.into_iter().zip(limbs) {
                sum = smmla(sum, codes, limbs);
            }
            sum
        };
        let high = dot(vdupq_n_s32(0), limbs[0]);
        if C::BITS == 4 && KIND == PLAIN {
            // At most 8 · 32 · 0x7f7f7f, which is below 2³¹.
            let sum = dot(vshlq_n_s32::<8>(high), limbs[1]);
            return vcvtq_n_f32_s32::<16>(dot(vshlq_n_s32::<8>(sum), limbs[2]));
        }
        let low = vshlq_n_s32::<8>(dot(vdupq_n_s32(0), limbs[1]));
        let low = dot(low, limbs[2]);
        vaddq_f32(vcvtq_f32_s32(high), vcvtq_n_f32_s32::<16>(low))
    }
}

/// Joins the low 8 bytes of two vectors.
#[inline(always)]
unsafe fn zip_low(a: int8x16_t, b: int8x16_t) -> int8x16_t {
    unsafe {
        let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
        vreinterpretq_s8_s64(vzip1q_s64(a, b))
    }
}

/// Joins the high 8 bytes of two vectors.
#[inline(always)]
unsafe fn zip_high(a: int8x16_t, b: int8x16_t) -> int8x16_t {
    unsafe {
        let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
        vreinterpretq_s8_s64(vzip2q_s64(a, b))
    }
}

/// The kernels of this module.
pub(super) struct Pairs;

impl Kernels for Pairs {
    fn of_codes<C: Codes, const KIND: u8>(layout: Layout, rows: usize) -> Kernel {
        let (run, rows): (unsafe fn(&Task, Range<usize>), usize) = match rows {
            1 | 2 => (multiply::<C, KIND, 1>, 2),
            3 | 4 => (multiply::<C, KIND, 2>, 4),
            5 | 6 => (multiply::<C, KIND, 3>, 6),
            _ => (multiply::<C, KIND, 4>, 8),
        };
        let form = Form {
            in_pairs: true,
            is_interleaved: is_interleaved(layout),
            has_sums: KIND == LEAST,
        };
        let reads = Reads::Fixed(form);
        Kernel { run, rows, reads }
    }
}
