//! The kernel that multiplies each input row by two rows of the weights.
//!
//! For each block, the kernel decodes 32 codes of both rows, and loads the six vectors of an input row's limbs once. A
//! block of 4-bit codes then takes 3 instructions to decode, 6 dot products and 4 instructions that sum and scale.

use super::codes::Codes;
use super::dots::{Dots, Plain, Sdot};
use super::{AHEAD, HALF_BLOCKS, Kernels, LEAST, is_interleaved, read_groups};
use crate::fixed_point::{BLOCK, Form, STEP};
use crate::input::Reads;
use crate::kernel::{Kernel, Task};
use crate::layout::Layout;
use crate::scales::Groups;
use crate::simd::{Neon, Simd};
use std::{arch::aarch64::*, array::from_fn, ops::Range};

/// The number of rows of the weights that share a load of the input.
const SHARED: usize = 2;

/// Four blocks of each row of the weights.
struct Step {
    /// The index of the first block.
    block: usize,
    low: [*const u8; SHARED],
    top: [*const u8; SHARED],
    scales: [*const f32; SHARED],
    least: [*const f32; SHARED],
}

/// Multiplies `R` input rows by the rows `range` of quantized weights.
///
/// # Safety
/// `range` is within the weights, no other thread computes these outputs, and the CPU has the instruction set. The
/// codes of the layout have the format `C`, and `KIND` is the layout's variant.
#[inline(always)]
pub(super) unsafe fn multiply<D: Dots, C: Codes, const KIND: u8, const R: usize>(
    task: &Task,
    layout: Layout,
    range: Range<usize>,
) {
    let mut groups: [Groups; SHARED] = from_fn(|_| Groups::of_blocks(layout, BLOCK));
    for output in range.clone().step_by(SHARED) {
        // The last row is multiplied twice if the number of rows is odd.
        let outputs: [usize; SHARED] = from_fn(|index| (output + index).min(range.end - 1));
        unsafe {
            let weights = outputs.map(|output| task.weights.add(output * task.row_bytes));
            for (groups, weights) in groups.iter_mut().zip(weights) {
                read_groups(groups, layout, weights);
            }
            let totals = totals::<D, C, KIND, R>(task, layout, weights, &groups);
            for (index, output) in outputs.into_iter().enumerate() {
                task.store::<Neon, R>(output, totals.map(|totals| totals[index]));
            }
        }
    }
}

/// Returns the products of two rows of the weights. The sum of a vector's lanes is the output.
#[inline(always)]
unsafe fn totals<D: Dots, C: Codes, const KIND: u8, const R: usize>(
    task: &Task,
    layout: Layout,
    weights: [*const u8; SHARED],
    groups: &[Groups; SHARED],
) -> [[float32x4_t; SHARED]; R] {
    let blocks = layout.columns / BLOCK;
    let per_block = if KIND == HALF_BLOCKS { 2 } else { 1 };
    unsafe {
        let mut totals = [[vdupq_n_f32(0.0); SHARED]; R];
        // The last blocks of a row, if they do not fill a step.
        let mut low = [[0u8; STEP * BLOCK]; SHARED];
        let mut top = [[0u8; STEP * BLOCK / 4]; SHARED];
        for block in (0..blocks).step_by(STEP) {
            let mut step = Step {
                block,
                low: weights.map(|weights| weights.add(block * C::LOW_BYTES)),
                top: weights.map(|weights| weights.add(4 * layout.top() + block * C::TOP_BYTES)),
                scales: from_fn(|row| groups[row].scale.as_ptr().add(block * per_block)),
                least: from_fn(|row| groups[row].least.as_ptr().wrapping_add(block)),
            };
            if block + STEP > blocks {
                for row in 0..SHARED {
                    let (from, to) = (step.low[row], low[row].as_mut_ptr());
                    std::ptr::copy_nonoverlapping(from, to, (blocks - block) * C::LOW_BYTES);
                    let (from, to) = (step.top[row], top[row].as_mut_ptr());
                    std::ptr::copy_nonoverlapping(from, to, (blocks - block) * C::TOP_BYTES);
                    (step.low[row], step.top[row]) = (low[row].as_ptr(), top[row].as_ptr());
                }
            }
            for low in step.low {
                for line in (0..STEP * C::LOW_BYTES).step_by(64) {
                    Neon::prefetch(low.wrapping_add(AHEAD + line));
                }
            }
            add::<D, C, KIND, R>(task, &mut totals, &step);
        }
        totals
    }
}

/// Adds the products of four blocks to `totals`.
#[inline(always)]
unsafe fn add<D: Dots, C: Codes, const KIND: u8, const R: usize>(
    task: &Task,
    totals: &mut [[float32x4_t; SHARED]; R],
    step: &Step,
) {
    let input = &task.input.fixed;
    unsafe {
        let mut scales = [vdupq_n_f32(0.0); SHARED];
        if KIND != HALF_BLOCKS {
            scales = step.scales.map(|scales| vld1q_f32(scales));
            if R == 1 {
                let units = vld1q_f32(input.units.as_ptr().add(step.block));
                scales = scales.map(|scales| vmulq_f32(scales, units));
            }
        }
        add_block::<D, C, KIND, R, 0>(task, totals, step, scales);
        add_block::<D, C, KIND, R, 1>(task, totals, step, scales);
        add_block::<D, C, KIND, R, 2>(task, totals, step, scales);
        add_block::<D, C, KIND, R, 3>(task, totals, step, scales);
        if KIND == LEAST {
            for (row, totals) in totals.iter_mut().enumerate() {
                let sums = vld1q_f32(input.sums.as_ptr().add(row * input.blocks + step.block));
                for (total, least) in totals.iter_mut().zip(step.least) {
                    *total = vfmaq_f32(*total, vld1q_f32(least), sums);
                }
            }
        }
    }
}

/// Adds the products of the block `INDEX` of a step, without minimums, to `totals`. If there is one input row, `scales`
/// contains the units.
#[inline(always)]
unsafe fn add_block<D: Dots, C: Codes, const KIND: u8, const R: usize, const INDEX: i32>(
    task: &Task,
    totals: &mut [[float32x4_t; SHARED]; R],
    step: &Step,
    scales: [float32x4_t; SHARED],
) {
    let index = INDEX as usize;
    unsafe {
        let codes: [[int8x16_t; 2]; SHARED] = from_fn(|row| {
            let low = step.low[row].add(index * C::LOW_BYTES);
            let top = step.top[row].add(index * C::TOP_BYTES);
            match KIND {
                LEAST => C::signed::<false>(low, top),
                _ => C::signed::<true>(low, top),
            }
        });
        for (row, totals) in totals.iter_mut().enumerate() {
            let at = (step.block + index) * R + row;
            let limbs = task.input.fixed.limbs.as_ptr().add(at * 3 * BLOCK);
            let limbs: [[int8x16_t; 2]; 3] = from_fn(|limb| {
                let limbs = limbs.add(limb * BLOCK);
                [vld1q_s8(limbs), vld1q_s8(limbs.add(16))]
            });
            let unit = *task.input.fixed.units.as_ptr().add(at);
            for (shared, total) in totals.iter_mut().enumerate() {
                let sum = sum::<D, C>(codes[shared], limbs);
                *total = if KIND == HALF_BLOCKS {
                    let scales = vld1_f32(step.scales[shared].add(2 * index));
                    let scales = vcombine_f32(scales, scales);
                    let sum = vmulq_n_f32(sum, unit);
                    vfmaq_f32(*total, sum, vzip1q_f32(scales, scales))
                } else if R == 1 {
                    vfmaq_laneq_f32::<INDEX>(*total, sum, scales[shared])
                } else {
                    let sum = vmulq_laneq_f32::<INDEX>(sum, scales[shared]);
                    vfmaq_n_f32(*total, sum, unit)
                };
            }
        }
    }
}

/// Returns the sum of the products of a block in units of 65536, in four lanes.
#[inline(always)]
unsafe fn sum<D: Dots, C: Codes>(codes: [int8x16_t; 2], limbs: [[int8x16_t; 2]; 3]) -> float32x4_t {
    unsafe {
        let zero = vdupq_n_s32(0);
        if C::BITS == 8 {
            // Three combined limbs times 8 codes exceed 32 bits, so only two limbs are combined.
            let high = D::dot::<false>(zero, codes, limbs[0]);
            let low = vshlq_n_s32::<8>(D::dot::<false>(zero, codes, limbs[1]));
            let low = D::dot::<false>(low, codes, limbs[2]);
            return vaddq_f32(vcvtq_f32_s32(high), vcvtq_n_f32_s32::<16>(low));
        }
        // At most 32 · 8 · 0x7f7f7f, which is below 2³¹.
        let sum = vshlq_n_s32::<8>(D::dot::<true>(zero, codes, limbs[0]));
        let sum = vshlq_n_s32::<8>(D::dot::<true>(sum, codes, limbs[1]));
        vcvtq_n_f32_s32::<16>(D::dot::<true>(sum, codes, limbs[2]))
    }
}

/// Defines the kernels of an instruction set.
macro_rules! kernels {
    ($name:ident, $dots:ty, $features:meta) => {
        pub(super) mod $name {
            use super::*;

            #[$features]
            unsafe fn run<C: Codes, const KIND: u8, const R: usize>(
                task: &Task,
                range: Range<usize>,
            ) {
                if let Some(layout) = task.layout {
                    unsafe { multiply::<$dots, C, KIND, R>(task, layout, range) }
                }
            }

            /// The kernels of this module.
            pub(in crate::fixed::neon) struct Rows;

            impl Kernels for Rows {
                fn of_codes<C: Codes, const KIND: u8>(layout: Layout, rows: usize) -> Kernel {
                    let (run, rows): (unsafe fn(&Task, Range<usize>), usize) = match rows {
                        1 => (run::<C, KIND, 1>, 1),
                        2 => (run::<C, KIND, 2>, 2),
                        3 | 4 => (run::<C, KIND, 4>, 4),
                        _ => (run::<C, KIND, 8>, 8),
                    };
                    let form = Form {
                        in_pairs: false,
                        is_interleaved: is_interleaved(layout),
                        has_sums: KIND == LEAST,
                    };
                    let reads = Reads::Fixed(form);
                    Kernel { run, rows, reads }
                }
            }
        }
    };
}

kernels!(plain, Plain, target_feature(enable = "neon"));
kernels!(sdot, Sdot, target_feature(enable = "neon,dotprod"));
