//! Decodes the codes of a step into two vectors of bytes: the codes of the even columns, and those of the odd columns.

use crate::simd::AND_OR;
use std::arch::x86_64::*;

/// A format of codes.
pub(super) trait Codes {
    /// The number of upper bits of a code.
    const TOP_BITS: usize;

    /// Returns the codes of a step. `low` is a vector of words with eight lower halves of codes each.
    ///
    /// # Safety
    /// `top` points to the upper bits of a step, and the CPU has the instruction set.
    unsafe fn decode(low: __m512i, top: *const u8) -> [__m512i; 2];
}

pub(super) struct FourBits;
pub(super) struct FiveBits;
pub(super) struct SixBits;

impl Codes for FourBits {
    const TOP_BITS: usize = 0;

    #[inline(always)]
    unsafe fn decode(low: __m512i, _top: *const u8) -> [__m512i; 2] {
        unsafe {
            let mask = _mm512_set1_epi8(15);
            [low, _mm512_srli_epi32::<4>(low)].map(|codes| _mm512_and_si512(codes, mask))
        }
    }
}

/// The upper bits of the eight codes of a word are one byte.
impl Codes for FiveBits {
    const TOP_BITS: usize = 1;

    #[inline(always)]
    unsafe fn decode(low: __m512i, top: *const u8) -> [__m512i; 2] {
        const EVEN: u64 = 0x5555_5555_5555_5555;
        unsafe {
            let [even, odd] = FourBits::decode(low, top);
            let words = top.cast::<[u64; 2]>().read_unaligned();
            let bits = |columns: u64| {
                let [first, last] = words.map(|word| _pext_u64(word, columns));
                first | last << 32
            };
            let sixteen = _mm512_set1_epi8(16);
            [
                _mm512_mask_add_epi8(even, bits(EVEN), even, sixteen),
                _mm512_mask_add_epi8(odd, bits(!EVEN), odd, sixteen),
            ]
        }
    }
}

/// The upper bits of the eight codes of a word are two bytes. Four bits of them belong to an even and an odd column.
impl Codes for SixBits {
    const TOP_BITS: usize = 2;

    #[inline(always)]
    unsafe fn decode(low: __m512i, top: *const u8) -> [__m512i; 2] {
        unsafe {
            let [even, odd] = FourBits::decode(low, top);
            // Moves the four bits of each pair of columns to a byte of its own.
            let top = _mm512_cvtepu16_epi32(_mm256_loadu_si256(top.cast()));
            let top = _mm512_or_si512(top, _mm512_slli_epi32::<8>(top));
            let top = _mm512_and_si512(top, _mm512_set1_epi32(0x00ff_00ff));
            let top = _mm512_or_si512(top, _mm512_slli_epi32::<4>(top));
            let mask = _mm512_set1_epi8(0x30);
            let of_even = _mm512_slli_epi32::<4>(top);
            let of_odd = _mm512_slli_epi32::<2>(top);
            [
                _mm512_ternarylogic_epi32::<AND_OR>(of_even, mask, even),
                _mm512_ternarylogic_epi32::<AND_OR>(of_odd, mask, odd),
            ]
        }
    }
}
