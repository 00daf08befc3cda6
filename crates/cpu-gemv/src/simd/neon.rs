//! NEON: 4 lanes.

use super::{ShiftedCodes, Simd};
use std::arch::{aarch64::*, asm};

#[derive(Clone, Copy)]
pub(crate) struct Neon;

impl Simd for Neon {
    const LANES: usize = 4;
    type Floats = float32x4_t;
    type Words = uint32x4_t;
    type FourBits = f32;
    type Book = uint8x16_t;
    type FiveBits = f32;

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch does not access memory. The standard library's function is unstable in Rust 1.95.
        unsafe {
            asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn splat(number: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(number) }
    }

    #[inline(always)]
    unsafe fn load(numbers: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(numbers) }
    }

    #[inline(always)]
    unsafe fn store(numbers: *mut f32, vector: float32x4_t) {
        unsafe { vst1q_f32(numbers, vector) }
    }

    #[inline(always)]
    unsafe fn half(bits: u16) -> f32 {
        unsafe {
            let halves = vreinterpret_f16_u16(vdup_n_u16(bits));
            vgetq_lane_f32::<0>(vcvt_f32_f16(halves))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(numbers: *const u8) -> float32x4_t {
        unsafe { vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(numbers))) }
    }

    #[inline(always)]
    unsafe fn load_words(words: *const u8) -> uint32x4_t {
        unsafe { vreinterpretq_u32_u8(vld1q_u8(words)) }
    }

    #[inline(always)]
    unsafe fn load_bytes(bytes: *const u8) -> uint32x4_t {
        unsafe {
            let four = bytes.cast::<u32>().read_unaligned();
            let eight = vreinterpret_u8_u32(vdup_n_u32(four));
            vmovl_u16(vget_low_u16(vmovl_u8(eight)))
        }
    }

    #[inline(always)]
    unsafe fn load_u16(numbers: *const u8) -> uint32x4_t {
        unsafe { vmovl_u16(vreinterpret_u16_u8(vld1_u8(numbers))) }
    }

    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    unsafe fn sum(vector: float32x4_t) -> f32 {
        unsafe { vaddvq_f32(vector) }
    }

    #[inline(always)]
    unsafe fn permute(vector: float32x4_t, lanes: uint32x4_t) -> float32x4_t {
        unsafe {
            // The bytes of lane `i` begin at byte `4 · i` of the vector.
            let first = vmulq_n_u32(lanes, 0x0404_0404);
            let bytes = vaddq_u32(first, vdupq_n_u32(0x0302_0100));
            let table = vreinterpretq_u8_f32(vector);
            vreinterpretq_f32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(bytes)))
        }
    }

    #[inline(always)]
    unsafe fn and(a: uint32x4_t, mask: u32) -> uint32x4_t {
        unsafe { vandq_u32(a, vdupq_n_u32(mask)) }
    }

    #[inline(always)]
    unsafe fn shift_left(words: uint32x4_t, count: u32) -> uint32x4_t {
        unsafe { vshlq_u32(words, vdupq_n_s32(count as i32)) }
    }

    #[inline(always)]
    unsafe fn shift_right(words: uint32x4_t, count: u32) -> uint32x4_t {
        unsafe { vshlq_u32(words, vdupq_n_s32(-(count as i32))) }
    }

    #[inline(always)]
    unsafe fn bits(words: uint32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(words) }
    }

    #[inline(always)]
    unsafe fn round_bf16(vector: float32x4_t) -> float32x4_t {
        unsafe {
            let bits = vreinterpretq_u32_f32(vector);
            let size = Self::and(bits, 0x7fff_ffff);
            let odd = Self::and(vshrq_n_u32::<16>(bits), 1);
            let rounded = vaddq_u32(vaddq_u32(size, vdupq_n_u32(0x7fff)), odd);
            // Keep a NaN whose mantissa is all ones from overflowing into the sign.
            let rounded = vminq_u32(rounded, vdupq_n_u32(0x7fff_ffff));
            let rounded = Self::and(rounded, 0xffff_0000);
            let sign = Self::and(bits, 0x8000_0000);
            vreinterpretq_f32_u32(vorrq_u32(rounded, sign))
        }
    }

    #[inline(always)]
    unsafe fn round_f16(vector: float32x4_t) -> float32x4_t {
        unsafe { vcvt_f32_f16(vcvt_f16_f32(vector)) }
    }

    #[inline(always)]
    unsafe fn four_bits(zero: f32) -> f32 {
        zero
    }

    #[inline(always)]
    unsafe fn code_of_4(words: uint32x4_t, index: usize, zero: f32) -> float32x4_t {
        unsafe { Self::code(words, index, 4, zero) }
    }

    #[inline(always)]
    unsafe fn book(integers: [i8; 16]) -> uint8x16_t {
        unsafe { vld1q_u8(integers.as_ptr().cast()) }
    }

    #[inline(always)]
    unsafe fn code_of_book(words: uint32x4_t, index: usize, book: uint8x16_t) -> float32x4_t {
        unsafe {
            // The lookup writes each number to the highest byte of its word, and zeros to the other bytes, whose
            // indices are out of range. The shift then extends the sign.
            let codes = Self::and(Self::shift_right(words, 4 * index as u32), 15);
            let indices = vorrq_u32(vshlq_n_u32::<24>(codes), vdupq_n_u32(0x00ff_ffff));
            let bytes = vqtbl1q_u8(book, vreinterpretq_u8_u32(indices));
            vcvtq_f32_s32(vshrq_n_s32::<24>(vreinterpretq_s32_u8(bytes)))
        }
    }

    #[inline(always)]
    unsafe fn five_bits(zero: f32) -> f32 {
        zero
    }

    #[inline(always)]
    unsafe fn code_of_5(
        words: uint32x4_t,
        top: uint32x4_t,
        index: usize,
        zero: f32,
    ) -> float32x4_t {
        unsafe { Self::code_with_top(words, top, index, 1, zero) }
    }

    #[inline(always)]
    unsafe fn code_of_6(
        words: uint32x4_t,
        top: uint32x4_t,
        index: usize,
        zero: f32,
    ) -> float32x4_t {
        unsafe { Self::code_with_top(words, top, index, 2, zero) }
    }

    #[inline(always)]
    unsafe fn code_of_8(words: uint32x4_t, index: usize, zero: f32) -> float32x4_t {
        unsafe { Self::code(words, index, 8, zero) }
    }
}

impl ShiftedCodes for Neon {
    #[inline(always)]
    unsafe fn or(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        unsafe { vorrq_u32(a, b) }
    }

    #[inline(always)]
    unsafe fn float(codes: uint32x4_t, zero: f32) -> float32x4_t {
        unsafe { vsubq_f32(vcvtq_f32_u32(codes), vdupq_n_f32(zero)) }
    }
}
