//! The kernels that multiply prepared input rows by a range of rows of the weights.

use crate::formats::{Codes, Floats};
use crate::input::{Input, Reads};
use crate::layout::{Layout, Rounding, Scales};
use crate::scales::{Groups, Lanes};
use crate::simd::{MOST_LANES, Simd};
use std::ops::Range;

/// The largest number of input rows that a kernel multiplies at once. A product of more rows computes them in chunks.
pub const CHUNK: usize = 8;

/// The format of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    F16,
    Bf16,
    Words(Layout),
}

/// A kernel, and the input that it reads.
pub(crate) struct Kernel {
    /// Multiplies the input by a range of rows of the weights.
    pub run: unsafe fn(&Task, Range<usize>),
    /// The number of input rows that the kernel reads. This number may exceed the actual number of input rows, because
    /// there are kernels only for some numbers of rows.
    pub rows: usize,
    pub reads: Reads,
}

/// One product, which several threads compute.
pub(crate) struct Task<'a> {
    pub input: &'a Input,
    /// The first byte of the weights.
    pub weights: *const u8,
    /// The number of bytes from one row of the weights to the next.
    pub row_bytes: usize,
    /// The layout of quantized rows; `None` for floats.
    pub layout: Option<Layout>,
    pub columns: usize,
    /// The number of input rows.
    pub rows: usize,
    /// The number of output columns, which is the number of rows of the weights.
    pub outputs: usize,
    /// The output, `[rows, outputs]`.
    pub output: *mut f32,
}

// SAFETY: the threads only read the input and the weights, and no two threads write the same element of the output.
unsafe impl Sync for Task<'_> {}

impl Task<'_> {
    /// Writes the outputs of one row of the weights, one output for each input row.
    ///
    /// # Safety
    /// `output` is below `self.outputs`, and no other thread writes this output. The CPU has the instruction set.
    #[inline(always)]
    pub(crate) unsafe fn store<S: Simd, const R: usize>(
        &self,
        output: usize,
        totals: [S::Floats; R],
    ) {
        for (row, total) in totals.into_iter().enumerate().take(self.rows) {
            unsafe { *self.output.add(row * self.outputs + output) = S::sum(total) };
        }
    }
}

/// Multiplies `R` input rows by the rows `range` of float weights. The kernel reads `N` rows of the weights at once.
/// Each sum is kept as `A` partial sums, so that an addition need not wait for the previous addition.
///
/// # Safety
/// `range` is within the weights, no other thread computes these outputs, and the CPU has the instruction set.
#[inline(always)]
pub(crate) unsafe fn floats<S, F, const N: usize, const R: usize, const A: usize>(
    task: &Task,
    range: Range<usize>,
) where
    S: Simd,
    F: Floats<S>,
{
    let mut output = range.start;
    unsafe {
        while output + N <= range.end {
            rows_of_floats::<S, F, N, R, A>(task, output);
            output += N;
        }
        for output in output..range.end {
            rows_of_floats::<S, F, 1, R, A>(task, output);
        }
    }
}

#[inline(always)]
unsafe fn rows_of_floats<S, F, const N: usize, const R: usize, const A: usize>(
    task: &Task,
    first: usize,
) where
    S: Simd,
    F: Floats<S>,
{
    let width = F::STEPS * S::LANES;
    let (whole, rest) = (task.columns / width, task.columns % width);
    unsafe {
        let rows: [*const u8; N] =
            std::array::from_fn(|index| task.weights.add((first + index) * task.row_bytes));
        let mut totals = [[[S::splat(0.0); A]; R]; N];
        let mut input = task.input.numbers.as_ptr();
        for block in 0..whole {
            for step in 0..F::STEPS {
                for (totals, row) in totals.iter_mut().zip(rows) {
                    let numbers = F::numbers(row.add(block * width * F::BYTES), step);
                    add_step::<S, R, A>(totals, numbers, input, [step, F::STEPS]);
                }
            }
            input = input.add(R * width);
        }
        if rest > 0 {
            for (totals, row) in totals.iter_mut().zip(rows) {
                let mut bytes = [0u8; 4 * 4 * MOST_LANES];
                let from = row.add(whole * width * F::BYTES);
                std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), rest * F::BYTES);
                for step in 0..F::STEPS {
                    let numbers = F::numbers(bytes.as_ptr(), step);
                    add_step::<S, R, A>(totals, numbers, input, [step, F::STEPS]);
                }
            }
        }
        for (index, totals) in totals.into_iter().enumerate() {
            task.store::<S, R>(first + index, totals.map(|parts| added::<S, A>(parts)));
        }
    }
}

/// Multiplies one vector of weights by each input row, and adds the products to `totals`. `input` points to a block of
/// the input rows. The block has `steps` vectors per row.
#[inline(always)]
unsafe fn add_step<S: Simd, const R: usize, const A: usize>(
    totals: &mut [[S::Floats; A]; R],
    numbers: S::Floats,
    input: *const f32,
    [step, steps]: [usize; 2],
) {
    for (row, total) in totals.iter_mut().enumerate() {
        unsafe {
            let x = S::load(input.add((row * steps + step) * S::LANES));
            total[step % A] = S::mul_add(numbers, x, total[step % A]);
        }
    }
}

/// Returns the sum of the partial sums.
#[inline(always)]
unsafe fn added<S: Simd, const A: usize>(parts: [S::Floats; A]) -> S::Floats {
    let mut sum = parts[0];
    for part in parts.into_iter().skip(1) {
        sum = unsafe { S::add(sum, part) };
    }
    sum
}

/// The prefetch of the rows of quantized weights. A kernel does not read a row in increasing order: it reads the row's
/// scales before its codes. The CPU's own prefetcher follows only increasing addresses, so each step of a kernel
/// prefetches the next lines of the following rows, in the order of their addresses.
#[derive(Clone, Copy)]
pub(crate) struct Prefetch {
    /// The distance in bytes from the rows that a kernel reads to the rows that it prefetches.
    ahead: usize,
    /// The number of bytes that a step prefetches.
    of_step: usize,
}

impl Prefetch {
    /// The number of bytes of a cache line.
    const LINE: usize = 64;
    /// The smallest distance in bytes. On an AMD EPYC with AVX-512 (2026-11-30), distances from 1,024 to 4,096 gave
    /// equal times, and 16,384 lost a third of the speed.
    const MIN_AHEAD: usize = 2048;

    /// Creates the prefetch of a kernel that reads `bytes` bytes of neighboring rows in `steps` steps.
    pub fn new(bytes: usize, steps: usize) -> Self {
        Self {
            ahead: Self::MIN_AHEAD.div_ceil(bytes) * bytes,
            of_step: bytes.div_ceil(Self::LINE * steps.max(1)) * Self::LINE,
        }
    }

    /// Prefetches the lines of a step. The rows that the kernel reads begin at `rows`.
    #[inline(always)]
    pub fn prefetch<S: Simd>(self, rows: *const u8, step: usize) {
        let first = self.ahead + step * self.of_step;
        for line in (0..self.of_step).step_by(Self::LINE) {
            S::prefetch(rows.wrapping_add(first + line));
        }
    }
}

/// Multiplies `R` input rows by the rows `range` of quantized weights.
///
/// # Safety
/// `range` is within the weights, no other thread computes these outputs, and the CPU has the instruction set. The
/// codes of the task's layout have the format `C`.
#[inline(always)]
pub(crate) unsafe fn quantized<S: Simd, C: Codes<S>, const R: usize>(
    task: &Task,
    layout: Layout,
    range: Range<usize>,
) {
    let mut groups = Groups::new(layout, S::LANES, C::CODES);
    let prefetch = Prefetch::new(task.row_bytes, layout.columns / (C::CODES * S::LANES));
    unsafe {
        let lanes = Lanes::<S>::new(layout.group() / C::CODES);
        let table = C::table(layout.format);
        for output in range {
            let row = task.weights.add(output * task.row_bytes).cast::<u32>();
            groups.read::<S>(layout, row.add(layout.scales()));
            let row = Row {
                words: row.cast(),
                top: row.add(layout.top()).cast(),
                prefetch,
                groups: &groups,
                lanes,
                layout,
            };
            let totals = match (layout.format.scales, layout.format.rounding) {
                _ if layout.format.has_least() => row.totals::<C, R, LEAST>(task.input, table),
                (Scales::SingleAndZero, _) | (_, Rounding::F16 | Rounding::BF16) => {
                    row.totals::<C, R, EACH>(task.input, table)
                }
                _ => row.totals::<C, R, PLAIN>(task.input, table),
            };
            task.store::<S, R>(output, totals);
        }
    }
}

/// The computation for groups that have only a scale. The scale multiplies the sum of the group's products.
const PLAIN: u8 = 0;
/// The computation for groups that have a scale and a minimum. The scale multiplies the sum of the group's products,
/// and the minimum multiplies the sum of the group's input elements.
const LEAST: u8 = 1;
/// The computation that dequantizes each element separately. It is necessary if elements are rounded, or if each group
/// has its own zero point.
const EACH: u8 = 2;

/// A quantized row.
struct Row<'a, S: Simd> {
    words: *const u8,
    top: *const u8,
    prefetch: Prefetch,
    groups: &'a Groups,
    lanes: Lanes<S>,
    layout: Layout,
}

impl<S: Simd> Row<'_, S> {
    /// Multiplies a row of the weights by all input rows. Returns one vector per input row. The sum of the vector's
    /// lanes is the output.
    ///
    /// # Safety
    /// The pointers point to a row of `layout`, whose codes have the format `C`, and the CPU has the instruction set.
    #[inline(always)]
    unsafe fn totals<C: Codes<S>, const R: usize, const KIND: u8>(
        &self,
        input: &Input,
        table: C::Table,
    ) -> [S::Floats; R] {
        let words = self.layout.columns / C::CODES;
        let (whole, rest) = (words / S::LANES, words % S::LANES);
        // The number of bytes that hold the upper bits of a block's codes.
        let of_top = S::LANES * C::CODES * C::TOP_BITS / 8;
        unsafe {
            let mut totals = [S::splat(0.0); R];
            for block in 0..whole {
                self.prefetch.prefetch::<S>(self.words, block);
                let low = S::load_words(self.words.add(block * 4 * S::LANES));
                let top = match C::TOP_BITS {
                    0 => low,
                    _ => C::top(self.top.add(block * of_top)),
                };
                self.add::<C, R, KIND>(&mut totals, input, block, [low, top], table);
            }
            if rest > 0 {
                let (mut low, mut top) = ([0u8; 4 * MOST_LANES], [0u8; 4 * MOST_LANES]);
                let from = self.words.add(whole * 4 * S::LANES);
                std::ptr::copy_nonoverlapping(from, low.as_mut_ptr(), rest * 4);
                let from = self.top.add(whole * of_top);
                let bytes = rest * C::CODES * C::TOP_BITS / 8;
                std::ptr::copy_nonoverlapping(from, top.as_mut_ptr(), bytes);
                let low = S::load_words(low.as_ptr());
                let top = match C::TOP_BITS {
                    0 => low,
                    _ => C::top(top.as_ptr()),
                };
                self.add::<C, R, KIND>(&mut totals, input, whole, [low, top], table);
            }
            totals
        }
    }

    /// Adds the products of one block to `totals`.
    #[inline(always)]
    unsafe fn add<C: Codes<S>, const R: usize, const KIND: u8>(
        &self,
        totals: &mut [S::Floats; R],
        input: &Input,
        block: usize,
        [low, top]: [S::Words; 2],
        table: C::Table,
    ) {
        unsafe {
            let scale = self.lanes.spread(self.groups.scale.as_ptr(), block);
            let first = input.numbers.as_ptr().add(block * R * C::CODES * S::LANES);
            if KIND == EACH {
                let zero = match self.groups.zero.is_empty() {
                    true => S::splat(0.0),
                    false => self.lanes.spread(self.groups.zero.as_ptr(), block),
                };
                let mut sums = [[S::splat(0.0); 2]; R];
                for step in 0..C::CODES {
                    let code = C::codes(low, top, step, table);
                    let number = S::mul(S::sub(code, zero), scale);
                    let number = match self.layout.format.rounding {
                        Rounding::None => number,
                        Rounding::BF16 => S::round_bf16(number),
                        Rounding::F16 => S::round_f16(number),
                    };
                    for (row, sum) in sums.iter_mut().enumerate() {
                        let x = S::load(first.add((row * C::CODES + step) * S::LANES));
                        sum[step % 2] = S::mul_add(number, x, sum[step % 2]);
                    }
                }
                for (total, [even, odd]) in totals.iter_mut().zip(sums) {
                    *total = S::add(*total, S::add(even, odd));
                }
                return;
            }
            let mut sums = [S::splat(0.0); R];
            for step in 0..C::CODES {
                let code = C::codes(low, top, step, table);
                for (row, sum) in sums.iter_mut().enumerate() {
                    let x = S::load(first.add((row * C::CODES + step) * S::LANES));
                    *sum = match step {
                        0 => S::mul(code, x),
                        _ => S::mul_add(code, x, *sum),
                    };
                }
            }
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total = S::mul_add(sum, scale, *total);
            }
            if KIND == LEAST {
                let least = self.lanes.spread(self.groups.least.as_ptr(), block);
                for (row, total) in totals.iter_mut().enumerate() {
                    let sum = input.sums.as_ptr().add((block * R + row) * S::LANES);
                    *total = S::mul_add(S::load(sum), least, *total);
                }
            }
        }
    }
}
