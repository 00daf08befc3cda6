//! The kernels with the dot products of AVX-512 VNNI. An instruction multiplies 64 unsigned codes by 64 signed limbs,
//! and adds the products of four columns to a lane.
//!
//! A *step* is 128 columns: a vector of 16 words, each with eight codes. A lane has the columns of one word, so a step
//! takes two dot products per limb. The zero point is subtracted after the products, as a correction that depends only
//! on the input. The loop of one input row and of Q4_0 has 26 instructions per row of the weights and step: 3 decode, 6
//! are dot products, 9 combine, correct and scale, and the others load.
//!
//! A kernel multiplies several rows of the weights at once, because the limbs of a step are six vectors, and a row of
//! the weights is one. With one input row, 4 rows of the weights were the fastest of 2, 4, 6 and 8: 84, 113, 97 and 115
//! ms for E2B's matrices in Q4_0 (one core of an AMD EPYC with AVX-512, 2026-11-30).
//!
//! The rows are prefetched in the order of their addresses, which the CPU's own prefetcher then follows. A prefetch in
//! the order of the kernel's reads takes 154 ms in place of 124 there, with the same code but for the prefetch.

mod codes;
mod parameters;

use crate::fixed_point::{Form, STEP, Step};
use crate::input::Reads;
use crate::kernel::{Format, Kernel, Prefetch, Task};
use crate::layout::{Layout, Rounding, Scales};
use crate::simd::{Avx512, MOST_LANES};
use codes::{Codes, FiveBits, FourBits, SixBits};
use parameters::{Buffered, Bytes, BytesAndLeast, Halves, Parameters};
use std::{arch::x86_64::*, array::from_fn, ops::Range};

/// The largest distance of a code from the zero point. A lane then sums at most `8 · 32 · 0x7f7f7f`, which is below
/// 2³¹. Sums before the correction may exceed 32 bits, because they wrap.
const MOST_DISTANCE: u32 = 32;

/// Returns the kernel of a format for `rows` input rows, or `None` if this module has no kernel for them.
pub(crate) fn kernel(format: Format, rows: usize) -> Option<Kernel> {
    let Format::Words(layout) = format else {
        return None;
    };
    let format = layout.format;
    let bits = format.bits;
    let distance = format
        .zero()
        .max(((1 << bits) - 1u32).saturating_sub(format.zero()));
    let is_served = matches!(bits, 4..=6)
        && distance <= MOST_DISTANCE
        && format.codebook.is_none()
        && format.rounding == Rounding::None
        && format.scales != Scales::SingleAndZero;
    if !is_served {
        return None;
    }
    Some(match (bits, format.has_least()) {
        (4, false) if Halves::serve(layout) => of_codes::<FourBits, Halves>(layout, rows),
        (4, true) if BytesAndLeast::serve(layout) => {
            of_codes::<FourBits, BytesAndLeast>(layout, rows)
        }
        (4, false) => of_codes::<FourBits, Buffered<false>>(layout, rows),
        (4, true) => of_codes::<FourBits, Buffered<true>>(layout, rows),
        (5, false) if Halves::serve(layout) => of_codes::<FiveBits, Halves>(layout, rows),
        (5, true) if BytesAndLeast::serve(layout) => {
            of_codes::<FiveBits, BytesAndLeast>(layout, rows)
        }
        (5, false) => of_codes::<FiveBits, Buffered<false>>(layout, rows),
        (5, true) => of_codes::<FiveBits, Buffered<true>>(layout, rows),
        (_, false) if Bytes::serve(layout) => of_codes::<SixBits, Bytes>(layout, rows),
        (_, false) => of_codes::<SixBits, Buffered<false>>(layout, rows),
        (_, true) => of_codes::<SixBits, Buffered<true>>(layout, rows),
    })
}

fn of_codes<C: Codes, P: Parameters>(layout: Layout, rows: usize) -> Kernel {
    let (run, rows): (unsafe fn(&Task, Range<usize>), usize) = match rows {
        1 => (multiply::<C, P, 1, 4>, 1),
        2 => (multiply::<C, P, 2, 4>, 2),
        3 => (multiply::<C, P, 3, 2>, 3),
        4 => (multiply::<C, P, 4, 2>, 4),
        5 | 6 => (multiply::<C, P, 6, 2>, 6),
        _ => (multiply::<C, P, 8, 2>, 8),
    };
    let form = Form {
        zero: layout.format.zero(),
        has_sums: P::HAS_LEAST,
    };
    let reads = Reads::Fixed(form);
    Kernel { run, rows, reads }
}

/// One step of `N` rows of the weights.
struct Weights<const N: usize> {
    /// The index of the step.
    index: usize,
    low: [*const u8; N],
    top: [*const u8; N],
}

/// Multiplies `R` input rows by the rows `range` of quantized weights, `N` of them at once.
///
/// # Safety
/// `range` is within the weights, no other thread computes these outputs, and the CPU has the instruction set. The
/// codes of the task's layout have the format `C`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn multiply<C: Codes, P: Parameters, const R: usize, const N: usize>(
    task: &Task,
    range: Range<usize>,
) {
    let Some(layout) = task.layout else {
        return;
    };
    let words = layout.columns / 8;
    let (whole, rest) = (words / MOST_LANES, words % MOST_LANES);
    let prefetch = Prefetch::new(N * task.row_bytes, whole);
    unsafe {
        let mut parameters: [P; N] = from_fn(|_| P::new(layout));
        for output in range.clone().step_by(N) {
            // The last row is multiplied several times if the number of rows is no multiple.
            let outputs: [usize; N] = from_fn(|index| (output + index).min(range.end - 1));
            let rows = outputs.map(|output| task.weights.add(output * task.row_bytes));
            for (parameters, row) in parameters.iter_mut().zip(rows) {
                parameters.read(layout, row);
            }
            let mut totals = [[_mm512_setzero_ps(); N]; R];
            let mut weights = Weights {
                index: 0,
                low: rows,
                top: rows.map(|row| row.add(4 * layout.top())),
            };
            while weights.index < whole {
                prefetch.prefetch::<Avx512>(rows[0], weights.index);
                add::<C, P, R, N>(task, &mut totals, &weights, &parameters);
                weights.index += 1;
                weights.low = weights.low.map(|low| low.add(STEP / 2));
                weights.top = weights.top.map(|top| top.add(STEP / 8 * C::TOP_BITS));
            }
            if rest > 0 {
                let (mut low, mut top) = ([[0u8; STEP / 2]; N], [[0u8; STEP / 4]; N]);
                for row in 0..N {
                    let (from, to) = (weights.low[row], low[row].as_mut_ptr());
                    std::ptr::copy_nonoverlapping(from, to, 4 * rest);
                    let (from, to) = (weights.top[row], top[row].as_mut_ptr());
                    std::ptr::copy_nonoverlapping(from, to, rest * C::TOP_BITS);
                }
                weights.low = from_fn(|row| low[row].as_ptr());
                weights.top = from_fn(|row| top[row].as_ptr());
                add::<C, P, R, N>(task, &mut totals, &weights, &parameters);
            }
            for (index, output) in outputs.into_iter().enumerate() {
                task.store::<Avx512, R>(output, totals.map(|totals| totals[index]));
            }
        }
    }
}

/// Adds the products of one step to `totals`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn add<C: Codes, P: Parameters, const R: usize, const N: usize>(
    task: &Task,
    totals: &mut [[__m512; N]; R],
    weights: &Weights<N>,
    parameters: &[P; N],
) {
    unsafe {
        let codes: [[__m512i; 2]; N] = from_fn(|row| {
            C::decode(
                _mm512_loadu_si512(weights.low[row].cast()),
                weights.top[row],
            )
        });
        let scales: [__m512; N] = from_fn(|row| parameters[row].scale(weights.index));
        let input = task.input.fixed.steps.as_ptr().add(weights.index * R);
        for (row, totals) in totals.iter_mut().enumerate() {
            let step: &Step = &*input.add(row);
            let mut sums = [_mm512_setzero_si512(); N];
            for (limb, limbs) in step.limbs.iter().enumerate() {
                let limbs = limbs
                    .each_ref()
                    .map(|limbs| _mm512_load_si512(limbs.as_ptr().cast()));
                for (sum, codes) in sums.iter_mut().zip(codes) {
                    if limb > 0 {
                        *sum = _mm512_slli_epi32::<8>(*sum);
                    }
                    for (codes, limbs) in codes.into_iter().zip(limbs) {
                        *sum = _mm512_dpbusd_epi32(*sum, codes, limbs);
                    }
                }
            }
            let corrections = _mm512_load_si512(step.corrections.as_ptr().cast());
            let units = _mm512_load_ps(step.units.as_ptr());
            for ((total, sum), scale) in totals.iter_mut().zip(sums).zip(scales) {
                let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(sum, corrections));
                *total = _mm512_fmadd_ps(_mm512_mul_ps(sum, units), scale, *total);
            }
            if P::HAS_LEAST {
                let sums = _mm512_load_ps(step.sums.as_ptr());
                for (total, parameters) in totals.iter_mut().zip(parameters) {
                    let least = parameters.least(weights.index);
                    *total = _mm512_fmadd_ps(sums, least, *total);
                }
            }
        }
    }
}
