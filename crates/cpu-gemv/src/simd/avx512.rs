//! AVX-512: 16 lanes.

use super::Simd;
use std::arch::x86_64::*;

/// The f32 number 2²³. Its lowest mantissa bit has the value 1. An OR of a code with the mantissa bits therefore adds
/// the code to the number.
const MAGIC: f32 = 8_388_608.0;
/// The truth table of `(a & b) | c`, for a ternary logic instruction.
pub(crate) const AND_OR: i32 = 0xea;
/// The truth table of `(a & b) | (!a & c)`, for a ternary logic instruction. Where a bit of the mask `a` is set, the
/// result has the bit of `b`. Elsewhere, the result has the bit of `c`.
pub(crate) const SELECT: i32 = 0xca;

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

impl Simd for Avx512 {
    const LANES: usize = 16;
    type Floats = __m512;
    type Words = __m512i;
    /// A lookup table: the float `code - zero` for each four-bit code. The permutation that looks up a code reads only
    /// the low 4 bits of an index, so the higher bits of a word need not be masked.
    type FourBits = __m512;
    type Book = __m512;
    /// A lookup table: the float `code - zero` for every five-bit code. The first vector is for codes 0 to 15, and the
    /// second vector is for codes 16 to 31.
    type FiveBits = (__m512, __m512);

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch does not access memory, and every x86-64 CPU has the instruction.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    unsafe fn splat(number: f32) -> __m512 {
        unsafe { _mm512_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(numbers: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(numbers) }
    }

    #[inline(always)]
    unsafe fn load_first(numbers: *const f32, count: usize) -> __m512 {
        unsafe {
            match count {
                1 | 2 => _mm512_castpd_ps(_mm512_castpd128_pd512(_mm_load_sd(numbers.cast()))),
                4 => _mm512_castps128_ps512(_mm_loadu_ps(numbers)),
                8 => _mm512_castps256_ps512(_mm256_loadu_ps(numbers)),
                _ => Self::load(numbers),
            }
        }
    }

    #[inline(always)]
    unsafe fn store(numbers: *mut f32, vector: __m512) {
        unsafe { _mm512_storeu_ps(numbers, vector) }
    }

    #[inline(always)]
    unsafe fn half(bits: u16) -> f32 {
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }

    #[inline(always)]
    unsafe fn load_f16(numbers: *const u8) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(numbers.cast())) }
    }

    #[inline(always)]
    unsafe fn load_words(words: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(words.cast()) }
    }

    #[inline(always)]
    unsafe fn load_bytes(bytes: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.cast())) }
    }

    #[inline(always)]
    unsafe fn load_u16(numbers: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(numbers.cast())) }
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sum(vector: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(vector) }
    }

    #[inline(always)]
    unsafe fn permute(vector: __m512, lanes: __m512i) -> __m512 {
        unsafe { _mm512_permutexvar_ps(lanes, vector) }
    }

    #[inline(always)]
    unsafe fn and(a: __m512i, mask: u32) -> __m512i {
        unsafe { _mm512_and_si512(a, _mm512_set1_epi32(mask as i32)) }
    }

    #[inline(always)]
    unsafe fn shift_left(words: __m512i, count: u32) -> __m512i {
        unsafe { _mm512_sllv_epi32(words, _mm512_set1_epi32(count as i32)) }
    }

    #[inline(always)]
    unsafe fn shift_right(words: __m512i, count: u32) -> __m512i {
        unsafe { _mm512_srlv_epi32(words, _mm512_set1_epi32(count as i32)) }
    }

    #[inline(always)]
    unsafe fn bits(words: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(words) }
    }

    #[inline(always)]
    unsafe fn round_bf16(vector: __m512) -> __m512 {
        unsafe {
            let bits = _mm512_castps_si512(vector);
            let size = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MAX));
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(size, _mm512_set1_epi32(0x7fff)), odd);
            // Keep a NaN whose mantissa is all ones from overflowing into the sign.
            let rounded = _mm512_min_epu32(rounded, _mm512_set1_epi32(i32::MAX));
            let rounded = _mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000u32 as i32));
            let sign = _mm512_and_si512(bits, _mm512_set1_epi32(i32::MIN));
            _mm512_castsi512_ps(_mm512_or_si512(rounded, sign))
        }
    }

    #[inline(always)]
    unsafe fn round_f16(vector: __m512) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector)) }
    }

    #[inline(always)]
    unsafe fn four_bits(zero: f32) -> __m512 {
        unsafe { table(-zero) }
    }

    #[inline(always)]
    unsafe fn code_of_4(words: __m512i, index: usize, table: __m512) -> __m512 {
        unsafe { _mm512_permutexvar_ps(Self::shift_right(words, 4 * index as u32), table) }
    }

    #[inline(always)]
    unsafe fn book(integers: [i8; 16]) -> __m512 {
        let numbers = integers.map(f32::from);
        unsafe { Self::load(numbers.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn code_of_book(words: __m512i, index: usize, book: __m512) -> __m512 {
        unsafe { Self::code_of_4(words, index, book) }
    }

    #[inline(always)]
    unsafe fn five_bits(zero: f32) -> (__m512, __m512) {
        unsafe { (table(-zero), table(16.0 - zero)) }
    }

    #[inline(always)]
    unsafe fn code_of_5(
        words: __m512i,
        top: __m512i,
        index: usize,
        (low, high): (__m512, __m512),
    ) -> __m512 {
        unsafe {
            let index = index as u32;
            let (words, top) = (
                Self::shift_right(words, 4 * index),
                Self::shift_right(top, index),
            );
            let codes = _mm512_ternarylogic_epi32::<SELECT>(_mm512_set1_epi32(15), words, top);
            _mm512_permutex2var_ps(low, codes, high)
        }
    }

    #[inline(always)]
    unsafe fn code_of_6(words: __m512i, top: __m512i, index: usize, zero: f32) -> __m512 {
        unsafe {
            let index = index as u32;
            let (words, top) = (
                Self::shift_right(words, 4 * index),
                Self::shift_right(top, 2 * index),
            );
            let codes = _mm512_ternarylogic_epi32::<SELECT>(_mm512_set1_epi32(15), words, top);
            float(codes, 63, zero)
        }
    }

    #[inline(always)]
    unsafe fn code_of_8(words: __m512i, index: usize, zero: f32) -> __m512 {
        unsafe { float(Self::shift_right(words, 8 * index as u32), 255, zero) }
    }
}

/// Returns the 16 numbers `first`, `first + 1`, …
#[inline(always)]
unsafe fn table(first: f32) -> __m512 {
    unsafe {
        let counts = _mm512_setr_ps(
            0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
        );
        _mm512_add_ps(counts, _mm512_set1_ps(first))
    }
}

/// Masks the codes out of the words, converts the codes to floats, and subtracts `zero`.
#[inline(always)]
unsafe fn float(codes: __m512i, mask: i32, zero: f32) -> __m512 {
    unsafe {
        let exponent = _mm512_castps_si512(_mm512_set1_ps(MAGIC));
        let mask = _mm512_set1_epi32(mask);
        let bits = _mm512_ternarylogic_epi32::<AND_OR>(codes, mask, exponent);
        _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(MAGIC + zero))
    }
}
