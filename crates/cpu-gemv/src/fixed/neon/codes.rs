//! Decodes a block of codes into two vectors of signed bytes.
//!
//! A word holds eight 4-bit codes or four 8-bit codes. The first vector of 4-bit codes has the codes of even columns,
//! and the second vector has the codes of odd columns. 8-bit codes stay in the order of the columns.

use crate::fixed_point::BLOCK;
use std::arch::aarch64::*;

/// A format of codes.
pub(super) trait Codes {
    /// The number of bits of a code.
    const BITS: usize;
    /// The number of bytes that hold the lower bits of a block.
    const LOW_BYTES: usize = match Self::BITS {
        8 => BLOCK,
        _ => BLOCK / 2,
    };
    /// The number of bytes that hold the upper bits of a block.
    const TOP_BYTES: usize = match Self::BITS {
        8 => 0,
        bits => BLOCK * (bits - 4) / 8,
    };

    /// Returns the codes of a block as unsigned bytes.
    ///
    /// # Safety
    /// `low` and `top` point to the lower and the upper bits of a block.
    unsafe fn block(low: *const u8, top: *const u8) -> [uint8x16_t; 2];

    /// Returns the codes of a block. If `HAS_ZERO` is true, the zero point `1 << (BITS - 1)` is subtracted.
    ///
    /// # Safety
    /// `low` and `top` point to the lower and the upper bits of a block.
    #[inline(always)]
    unsafe fn signed<const HAS_ZERO: bool>(low: *const u8, top: *const u8) -> [int8x16_t; 2] {
        unsafe {
            let zero = vdupq_n_u8(1 << (Self::BITS - 1));
            Self::block(low, top).map(|codes| {
                vreinterpretq_s8_u8(match HAS_ZERO {
                    true => vsubq_u8(codes, zero),
                    false => codes,
                })
            })
        }
    }
}

pub(super) struct FourBits;
pub(super) struct FiveBits;
pub(super) struct SixBits;
pub(super) struct EightBits;

impl Codes for FourBits {
    const BITS: usize = 4;

    #[inline(always)]
    unsafe fn block(low: *const u8, _top: *const u8) -> [uint8x16_t; 2] {
        unsafe {
            let words = vld1q_u8(low);
            [vandq_u8(words, vdupq_n_u8(15)), vshrq_n_u8::<4>(words)]
        }
    }
}

/// The upper bits of the eight codes of a word are one byte.
impl Codes for FiveBits {
    const BITS: usize = 5;

    #[inline(always)]
    unsafe fn block(low: *const u8, top: *const u8) -> [uint8x16_t; 2] {
        const WORDS: [u8; 16] = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3];
        const EVEN: u32 = 0x40_10_04_01;
        unsafe {
            let [even, odd] = FourBits::block(low, top);
            let top = vdupq_n_u32(top.cast::<u32>().read_unaligned());
            let top = vqtbl1q_u8(vreinterpretq_u8_u32(top), vld1q_u8(WORDS.as_ptr()));
            let bit = |bits: u32| {
                let is_set = vtstq_u8(top, vreinterpretq_u8_u32(vdupq_n_u32(bits)));
                vandq_u8(is_set, vdupq_n_u8(16))
            };
            [vorrq_u8(even, bit(EVEN)), vorrq_u8(odd, bit(EVEN << 1))]
        }
    }
}

/// The upper bits of the eight codes of a word are two bytes. Each byte has the upper bits of four codes.
impl Codes for SixBits {
    const BITS: usize = 6;

    #[inline(always)]
    unsafe fn block(low: *const u8, top: *const u8) -> [uint8x16_t; 2] {
        const HALF_WORDS: [u8; 16] = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7];
        unsafe {
            let [even, odd] = FourBits::block(low, top);
            let top = vcombine_u8(vld1_u8(top), vdup_n_u8(0));
            let top = vqtbl1q_u8(top, vld1q_u8(HALF_WORDS.as_ptr()));
            // Shifts the upper bits of a code to bits 4 and 5. The shifts of neighboring bytes differ by 4.
            let bits = |first: i8| {
                let counts = u16::from_le_bytes([first as u8, (first - 4) as u8]);
                let counts = vreinterpretq_s8_u16(vdupq_n_u16(counts));
                vandq_u8(vshlq_u8(top, counts), vdupq_n_u8(0x30))
            };
            [vorrq_u8(even, bits(4)), vorrq_u8(odd, bits(2))]
        }
    }
}

impl Codes for EightBits {
    const BITS: usize = 8;

    #[inline(always)]
    unsafe fn block(low: *const u8, _top: *const u8) -> [uint8x16_t; 2] {
        unsafe { [vld1q_u8(low), vld1q_u8(low.add(16))] }
    }
}
