//! The kernels for input rows in bf16, with AVX-512's dot products of bf16 pairs. One of these instructions multiplies
//! 32 weights, and an instruction on f32 multiplies 16 weights. The products of two bf16 elements are exact in f32, and
//! the sums are in f32.
//!
//! The dot-product instruction treats subnormal numbers as zero.

use crate::kernel::{Prefetch, Task};
use crate::layout::{Format, Layout, Rounding, Scales};
use crate::scales::{Groups, Lanes};
use crate::simd::{Avx512, MOST_LANES, SELECT, Simd};
use half::bf16;
use std::{arch::x86_64::*, ops::Range};

/// The number of bf16 elements in a vector.
pub(crate) const HALVES: usize = 32;
/// The number of vectors in a block of bf16 weights. A kernel reads a row of weights one block at a time.
pub(crate) const FLOAT_STEPS: usize = 4;
/// The number of bf16 vectors into which a block of quantized weights is decoded. The block itself is one vector of
/// 32-bit words. Each 16-bit lane of the block holds four 4-bit codes. The decoded vector `i` consists of the `i`-th
/// code of each lane.
pub(crate) const CODE_STEPS: usize = 4;

/// True if the kernels of this module support quantized rows of `layout`.
pub(crate) fn serves(layout: Layout) -> bool {
    let format = layout.format;
    // If the zero point is at most 256, the difference of a code and the zero point is exact in bf16. So are the
    // numbers of the codebooks.
    matches!(format.bits, 4 | 6)
        && format.rounding == Rounding::None
        && format.scales != Scales::SingleAndZero
        && format.zero() <= 256
}

/// Multiplies `R` input rows by the rows `range` of bf16 weights. Each sum is kept as `A` partial sums, so that an
/// addition need not wait for the previous addition.
///
/// # Safety
/// `range` is within the weights, no other thread computes these outputs, and the CPU has the instruction set.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn floats<const R: usize, const A: usize>(task: &Task, range: Range<usize>) {
    const WIDTH: usize = FLOAT_STEPS * HALVES;
    let (whole, rest) = (task.columns / WIDTH, task.columns % WIDTH);
    unsafe {
        for output in range {
            let row = task.weights.add(output * task.row_bytes);
            let mut totals = [[_mm512_setzero_ps(); A]; R];
            let mut input = task.input.halves.as_ptr();
            for block in 0..whole {
                add_floats(&mut totals, row.add(block * 2 * WIDTH), input);
                input = input.add(R * WIDTH);
            }
            if rest > 0 {
                let mut bytes = [0u8; 2 * WIDTH];
                let from = row.add(whole * 2 * WIDTH);
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), 2 * rest);
                add_floats(&mut totals, bytes.as_ptr(), input);
            }
            let mut sums = [_mm512_setzero_ps(); R];
            for (sum, parts) in sums.iter_mut().zip(totals) {
                for part in parts {
                    *sum = _mm512_add_ps(*sum, part);
                }
            }
            task.store::<Avx512, R>(output, sums);
        }
    }
}

/// Adds the products of one block of bf16 weights to `totals`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn add_floats<const R: usize, const A: usize>(
    totals: &mut [[__m512; A]; R],
    weights: *const u8,
    input: *const bf16,
) {
    for step in 0..FLOAT_STEPS {
        unsafe {
            let weights = halves(weights.add(step * 2 * HALVES));
            for (row, total) in totals.iter_mut().enumerate() {
                let x = halves(input.add((row * FLOAT_STEPS + step) * HALVES).cast());
                total[step % A] = _mm512_dpbf16_ps(total[step % A], weights, x);
            }
        }
    }
}

/// Multiplies `R` input rows by the rows `range` of quantized weights, whose codes have `BITS` bits: 4 or 6.
///
/// # Safety
/// `range` is within the weights, no other thread computes these outputs, and the CPU has the instruction set.
/// [`serves`] is true for the task's layout.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn codes<const BITS: usize, const R: usize>(task: &Task, range: Range<usize>) {
    let Some(layout) = task.layout else {
        return;
    };
    let mut groups = Groups::new(layout, MOST_LANES, 8);
    let has_least = layout.format.has_least();
    let words = layout.columns / 8;
    let (whole, rest) = (words / MOST_LANES, words % MOST_LANES);
    let prefetch = Prefetch::new(task.row_bytes, whole);
    unsafe {
        let lanes = Lanes::<Avx512>::new(layout.group() / 8);
        let tables = tables::<BITS>(layout.format);
        for output in range {
            let row = task.weights.add(output * task.row_bytes).cast::<u32>();
            groups.read::<Avx512>(layout, row.add(layout.scales()));
            let of_top = row.add(layout.top()).cast::<u8>();
            let mut totals = [_mm512_setzero_ps(); R];
            let parameters = [groups.scale.as_ptr(), groups.least.as_ptr()];
            for block in 0..whole {
                prefetch.prefetch::<Avx512>(row.cast(), block);
                let words = _mm512_loadu_si512(row.add(block * MOST_LANES).cast());
                let top = match BITS {
                    4 => words,
                    _ => top(of_top.add(block * HALVES)),
                };
                add::<BITS, R>(
                    task,
                    &mut totals,
                    block,
                    [words, top],
                    tables,
                    lanes,
                    parameters,
                    has_least,
                );
            }
            if rest > 0 {
                let (mut low, mut last) = ([0u32; MOST_LANES], [0u8; HALVES]);
                let from = row.add(whole * MOST_LANES);
                std::ptr::copy_nonoverlapping(from, low.as_mut_ptr(), rest);
                let words = _mm512_loadu_si512(low.as_ptr().cast());
                let top = match BITS {
                    4 => words,
                    _ => {
                        let from = of_top.add(whole * HALVES);
                        std::ptr::copy_nonoverlapping(from, last.as_mut_ptr(), 2 * rest);
                        top(last.as_ptr())
                    }
                };
                add::<BITS, R>(
                    task,
                    &mut totals,
                    whole,
                    [words, top],
                    tables,
                    lanes,
                    parameters,
                    has_least,
                );
            }
            task.store::<Avx512, R>(output, totals);
        }
    }
}

/// Returns the bf16 number that a code stands for before scaling, for codes 0 to 31, and for codes 32 to 63.
///
/// A permutation of one table reads 5 bits of an index. Only the first 4 bits belong to a 4-bit code, and the fifth bit
/// belongs to the next code. The table of 4-bit codes contains the 16 numbers twice, so the fifth bit has no effect.
#[inline]
#[target_feature(enable = "avx512f")]
fn tables<const BITS: usize>(format: Format) -> [__m512i; 2] {
    let table = |first: usize| {
        let numbers: [bf16; HALVES] = std::array::from_fn(|index| {
            let code = (first + index) % (1 << BITS);
            bf16::from_f32(format.unscaled(code as u32))
        });
        // SAFETY: the numbers fill a vector.
        unsafe { _mm512_loadu_si512(numbers.as_ptr().cast()) }
    };
    [table(0), table(HALVES)]
}

/// Loads the upper bits of a block of 6-bit codes. The four codes of a 16-bit lane have one byte of upper bits. The
/// byte is shifted left by 4.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn top(bytes: *const u8) -> __m512i {
    unsafe { _mm512_slli_epi16::<4>(_mm512_cvtepu8_epi16(_mm256_loadu_si256(bytes.cast()))) }
}

/// Adds the products of one block to `totals`. `words` are the lower bits of the codes, and `top` are the upper bits of
/// 6-bit codes. `parameters` holds a pointer to the scales and a pointer to the minimums of the row's groups.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
#[allow(clippy::too_many_arguments, reason = "the arguments stay in registers")]
unsafe fn add<const BITS: usize, const R: usize>(
    task: &Task,
    totals: &mut [__m512; R],
    block: usize,
    [words, top]: [__m512i; 2],
    tables: [__m512i; 2],
    lanes: Lanes<Avx512>,
    parameters: [*const f32; 2],
    has_least: bool,
) {
    unsafe {
        let input = task.input.halves.as_ptr();
        let input = input.add(block * R * CODE_STEPS * HALVES);
        let mut sums = [_mm512_setzero_ps(); R];
        for step in 0..CODE_STEPS {
            let words = _mm512_srl_epi16(words, _mm_cvtsi32_si128(4 * step as i32));
            let codes = match BITS {
                4 => _mm512_permutexvar_epi16(words, tables[0]),
                _ => {
                    let top = _mm512_srl_epi16(top, _mm_cvtsi32_si128(2 * step as i32));
                    // The permutation of two tables reads 6 bits of an index.
                    let low_bits = _mm512_set1_epi16(15);
                    let index = _mm512_ternarylogic_epi32::<SELECT>(low_bits, words, top);
                    _mm512_permutex2var_epi16(tables[0], index, tables[1])
                }
            };
            let codes = std::mem::transmute::<__m512i, __m512bh>(codes);
            for (row, sum) in sums.iter_mut().enumerate() {
                let x = halves(input.add((row * CODE_STEPS + step) * HALVES).cast());
                *sum = _mm512_dpbf16_ps(*sum, codes, x);
            }
        }
        let scale = lanes.spread(parameters[0], block);
        for (total, sum) in totals.iter_mut().zip(sums) {
            *total = _mm512_fmadd_ps(sum, scale, *total);
        }
        if has_least {
            let least = lanes.spread(parameters[1], block);
            for (row, total) in totals.iter_mut().enumerate() {
                let sums = task.input.sums.as_ptr();
                let sum = Avx512::load(sums.add((block * R + row) * MOST_LANES));
                *total = _mm512_fmadd_ps(sum, least, *total);
            }
        }
    }
}

/// Loads 32 bf16 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn halves(elements: *const u8) -> __m512bh {
    unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(elements.cast())) }
}
