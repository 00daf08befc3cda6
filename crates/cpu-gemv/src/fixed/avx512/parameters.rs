//! The scales and the minimums of a step, one number per lane.

use crate::layout::{Layout, SUPER, SUPER_WORDS, Scales};
use crate::scales::{Groups, Lanes};
use crate::simd::{Avx512, MOST_LANES, Simd};
use std::arch::x86_64::*;

/// The parameters of the groups of a row of the weights.
pub(super) trait Parameters {
    /// True if the groups have minimums.
    const HAS_LEAST: bool;

    /// Creates the parameters of no row.
    ///
    /// # Safety
    /// The CPU has AVX-512.
    unsafe fn new(layout: Layout) -> Self;

    /// Changes to the row at `row`.
    ///
    /// # Safety
    /// `row` points to a row of the layout, and the CPU has AVX-512.
    unsafe fn read(&mut self, layout: Layout, row: *const u8);

    /// Returns the scale of each lane of a step.
    ///
    /// # Safety
    /// The step is within the row, and the CPU has AVX-512.
    unsafe fn scale(&self, step: usize) -> __m512;

    /// Returns the minimum of each lane of a step.
    ///
    /// # Safety
    /// The step is within the row, and the CPU has AVX-512.
    unsafe fn least(&self, step: usize) -> __m512;
}

/// The parameters of any layout, which are converted to f32 before a row is multiplied. For Q4_0 this takes a quarter
/// of the time of a product, so the common layouts have their own parameters.
pub(super) struct Buffered<const HAS_LEAST: bool> {
    groups: Groups,
    lanes: Lanes<Avx512>,
}

impl<const HAS_LEAST: bool> Parameters for Buffered<HAS_LEAST> {
    const HAS_LEAST: bool = HAS_LEAST;

    #[inline(always)]
    unsafe fn new(layout: Layout) -> Self {
        Self {
            groups: Groups::new(layout, MOST_LANES, 8),
            lanes: unsafe { Lanes::new(layout.group() / 8) },
        }
    }

    #[inline(always)]
    unsafe fn read(&mut self, layout: Layout, row: *const u8) {
        unsafe { read_groups(&mut self.groups, layout, row) }
    }

    #[inline(always)]
    unsafe fn scale(&self, step: usize) -> __m512 {
        unsafe { self.lanes.spread(self.groups.scale.as_ptr(), step) }
    }

    #[inline(always)]
    unsafe fn least(&self, step: usize) -> __m512 {
        unsafe { self.lanes.spread(self.groups.least.as_ptr(), step) }
    }
}

/// Reads the parameters of a row of the weights. The function is not inlined, so that the many kernels share its code.
///
/// # Safety
/// `row` points to a row of `layout`, and the CPU has the instruction set.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn read_groups(groups: &mut Groups, layout: Layout, row: *const u8) {
    unsafe { groups.read::<Avx512>(layout, row.cast::<u32>().add(layout.scales())) };
}

/// Scales in f16 of groups of 32 columns, in rows of whole steps. The field points to the scales of a row.
pub(super) struct Halves(*const u8);

impl Halves {
    /// True if a layout has such scales.
    pub fn serve(layout: Layout) -> bool {
        let is_half = matches!(layout.format.scales, Scales::Half { .. });
        is_half && layout.group() == 32 && layout.columns.is_multiple_of(8 * MOST_LANES)
    }
}

impl Parameters for Halves {
    const HAS_LEAST: bool = false;

    #[inline(always)]
    unsafe fn new(_layout: Layout) -> Self {
        Self(std::ptr::null())
    }

    #[inline(always)]
    unsafe fn read(&mut self, layout: Layout, row: *const u8) {
        self.0 = unsafe { row.add(4 * layout.scales()) };
    }

    #[inline(always)]
    unsafe fn scale(&self, step: usize) -> __m512 {
        unsafe { four(_mm_cvtph_ps(_mm_loadl_epi64(self.0.add(8 * step).cast()))) }
    }

    #[inline(always)]
    unsafe fn least(&self, _step: usize) -> __m512 {
        unsafe { Avx512::splat(0.0) }
    }
}

/// Signed bytes that multiply the f16 scale of a super-block, for groups of 16 columns. The field points to the
/// parameters of a row.
pub(super) struct Bytes(*const u8);

impl Bytes {
    /// True if a layout has such scales.
    pub fn serve(layout: Layout) -> bool {
        matches!(layout.format.scales, Scales::Bytes { .. })
    }
}

impl Parameters for Bytes {
    const HAS_LEAST: bool = false;

    #[inline(always)]
    unsafe fn new(_layout: Layout) -> Self {
        Self(std::ptr::null())
    }

    #[inline(always)]
    unsafe fn read(&mut self, layout: Layout, row: *const u8) {
        self.0 = unsafe { row.add(4 * layout.scales()) };
    }

    #[inline(always)]
    unsafe fn scale(&self, step: usize) -> __m512 {
        unsafe {
            let of_super = self.0.add(step / 2 * 4 * SUPER_WORDS);
            let factor = _mm256_broadcastss_ps(factors(of_super));
            let bytes = _mm_loadl_epi64(of_super.add(4 + step % 2 * 8).cast());
            let scales = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), factor);
            let lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            _mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(scales))
        }
    }

    #[inline(always)]
    unsafe fn least(&self, _step: usize) -> __m512 {
        unsafe { Avx512::splat(0.0) }
    }
}

/// Bytes that multiply the f16 scale and the f16 minimum of a super-block, for groups of 32 columns. The field points
/// to the parameters of a row.
pub(super) struct BytesAndLeast(*const u8);

impl BytesAndLeast {
    /// True if a layout has such scales and minimums.
    pub fn serve(layout: Layout) -> bool {
        layout.format.scales == Scales::BytesAndLeast
    }

    /// Returns four bytes as floats. The first of them is at `at` from the super-block's own bytes.
    #[inline(always)]
    unsafe fn floats(of_super: *const u8, at: usize) -> __m128 {
        unsafe {
            let bytes = of_super.add(4 + at).cast::<i32>().read_unaligned();
            _mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(bytes)))
        }
    }
}

impl Parameters for BytesAndLeast {
    const HAS_LEAST: bool = true;

    #[inline(always)]
    unsafe fn new(_layout: Layout) -> Self {
        Self(std::ptr::null())
    }

    #[inline(always)]
    unsafe fn read(&mut self, layout: Layout, row: *const u8) {
        self.0 = unsafe { row.add(4 * layout.scales()) };
    }

    #[inline(always)]
    unsafe fn scale(&self, step: usize) -> __m512 {
        unsafe {
            let of_super = self.0.add(step / 2 * 4 * SUPER_WORDS);
            let factor = _mm_broadcastss_ps(factors(of_super));
            four(_mm_mul_ps(Self::floats(of_super, step % 2 * 4), factor))
        }
    }

    #[inline(always)]
    unsafe fn least(&self, step: usize) -> __m512 {
        unsafe {
            let of_super = self.0.add(step / 2 * 4 * SUPER_WORDS);
            let factors = factors(of_super);
            let factor = _mm_xor_ps(_mm_movehdup_ps(factors), _mm_set1_ps(-0.0));
            let factor = _mm_broadcastss_ps(factor);
            four(_mm_mul_ps(Self::floats(of_super, 8 + step % 2 * 4), factor))
        }
    }
}

// A super-block is two steps.
const _: () = assert!(SUPER == 2 * 8 * MOST_LANES);

/// Returns the two f16 numbers at the beginning of a super-block's words.
#[inline(always)]
unsafe fn factors(of_super: *const u8) -> __m128 {
    unsafe { _mm_cvtph_ps(_mm_cvtsi32_si128(of_super.cast::<i32>().read_unaligned())) }
}

/// Repeats four numbers, each of them four times.
#[inline(always)]
unsafe fn four(numbers: __m128) -> __m512 {
    unsafe {
        let lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(numbers))
    }
}
