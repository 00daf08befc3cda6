//! AVX2 with FMA and F16C: 8 lanes.

use super::{ShiftedCodes, Simd};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

impl Simd for Avx2 {
    const LANES: usize = 8;
    type Floats = __m256;
    type Words = __m256i;
    type FourBits = f32;
    /// The numbers of codes 0 to 7, and of codes 8 to 15.
    type Book = (__m256, __m256);
    type FiveBits = f32;

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch does not access memory, and every x86-64 CPU has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    unsafe fn splat(number: f32) -> __m256 {
        unsafe { _mm256_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(numbers: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(numbers) }
    }

    #[inline(always)]
    unsafe fn load_first(numbers: *const f32, count: usize) -> __m256 {
        unsafe {
            match count {
                1 | 2 => _mm256_castpd_ps(_mm256_castpd128_pd256(_mm_load_sd(numbers.cast()))),
                4 => _mm256_castps128_ps256(_mm_loadu_ps(numbers)),
                _ => Self::load(numbers),
            }
        }
    }

    #[inline(always)]
    unsafe fn store(numbers: *mut f32, vector: __m256) {
        unsafe { _mm256_storeu_ps(numbers, vector) }
    }

    #[inline(always)]
    unsafe fn half(bits: u16) -> f32 {
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }

    #[inline(always)]
    unsafe fn load_f16(numbers: *const u8) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(numbers.cast())) }
    }

    #[inline(always)]
    unsafe fn load_words(words: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(words.cast()) }
    }

    #[inline(always)]
    unsafe fn load_bytes(bytes: *const u8) -> __m256i {
        unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.cast())) }
    }

    #[inline(always)]
    unsafe fn load_u16(numbers: *const u8) -> __m256i {
        unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(numbers.cast())) }
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(vector: __m256) -> f32 {
        unsafe {
            let (low, high) = (
                _mm256_castps256_ps128(vector),
                _mm256_extractf128_ps::<1>(vector),
            );
            let four = _mm_add_ps(low, high);
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn permute(vector: __m256, lanes: __m256i) -> __m256 {
        unsafe { _mm256_permutevar8x32_ps(vector, lanes) }
    }

    #[inline(always)]
    unsafe fn and(a: __m256i, mask: u32) -> __m256i {
        unsafe { _mm256_and_si256(a, _mm256_set1_epi32(mask as i32)) }
    }

    #[inline(always)]
    unsafe fn shift_left(words: __m256i, count: u32) -> __m256i {
        unsafe { _mm256_sllv_epi32(words, _mm256_set1_epi32(count as i32)) }
    }

    #[inline(always)]
    unsafe fn shift_right(words: __m256i, count: u32) -> __m256i {
        unsafe { _mm256_srlv_epi32(words, _mm256_set1_epi32(count as i32)) }
    }

    #[inline(always)]
    unsafe fn bits(words: __m256i) -> __m256 {
        unsafe { _mm256_castsi256_ps(words) }
    }

    #[inline(always)]
    unsafe fn round_bf16(vector: __m256) -> __m256 {
        unsafe {
            let bits = _mm256_castps_si256(vector);
            let size = _mm256_and_si256(bits, _mm256_set1_epi32(i32::MAX));
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(_mm256_add_epi32(size, _mm256_set1_epi32(0x7fff)), odd);
            // Keep a NaN whose mantissa is all ones from overflowing into the sign.
            let rounded = _mm256_min_epu32(rounded, _mm256_set1_epi32(i32::MAX));
            let rounded = _mm256_and_si256(rounded, _mm256_set1_epi32(0xffff_0000u32 as i32));
            let sign = _mm256_and_si256(bits, _mm256_set1_epi32(i32::MIN));
            _mm256_castsi256_ps(_mm256_or_si256(rounded, sign))
        }
    }

    #[inline(always)]
    unsafe fn round_f16(vector: __m256) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector)) }
    }

    #[inline(always)]
    unsafe fn four_bits(zero: f32) -> f32 {
        zero
    }

    #[inline(always)]
    unsafe fn code_of_4(words: __m256i, index: usize, zero: f32) -> __m256 {
        unsafe { Self::code(words, index, 4, zero) }
    }

    #[inline(always)]
    unsafe fn book(integers: [i8; 16]) -> (__m256, __m256) {
        let numbers = integers.map(f32::from);
        unsafe {
            (
                Self::load(numbers.as_ptr()),
                Self::load(numbers.as_ptr().add(8)),
            )
        }
    }

    #[inline(always)]
    unsafe fn code_of_book(words: __m256i, index: usize, (low, high): (__m256, __m256)) -> __m256 {
        unsafe {
            // A permutation reads the lower 3 bits of a code. The blend reads the sign bit, so bit 3 moves there.
            let codes = Self::shift_right(words, 4 * index as u32);
            let [low, high] = [low, high].map(|part| _mm256_permutevar8x32_ps(part, codes));
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(Self::shift_left(codes, 28)))
        }
    }

    #[inline(always)]
    unsafe fn five_bits(zero: f32) -> f32 {
        zero
    }

    #[inline(always)]
    unsafe fn code_of_5(words: __m256i, top: __m256i, index: usize, zero: f32) -> __m256 {
        unsafe { Self::code_with_top(words, top, index, 1, zero) }
    }

    #[inline(always)]
    unsafe fn code_of_6(words: __m256i, top: __m256i, index: usize, zero: f32) -> __m256 {
        unsafe { Self::code_with_top(words, top, index, 2, zero) }
    }

    #[inline(always)]
    unsafe fn code_of_8(words: __m256i, index: usize, zero: f32) -> __m256 {
        unsafe { Self::code(words, index, 8, zero) }
    }
}

impl ShiftedCodes for Avx2 {
    #[inline(always)]
    unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_or_si256(a, b) }
    }

    #[inline(always)]
    unsafe fn float(codes: __m256i, zero: f32) -> __m256 {
        unsafe { _mm256_sub_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(zero)) }
    }
}
