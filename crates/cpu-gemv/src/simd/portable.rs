//! Arrays of 8 lanes in plain Rust, for CPUs without another implementation.

use super::{ShiftedCodes, Simd};
use half::{bf16, f16};
use std::array::from_fn;

const LANES: usize = 8;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    const LANES: usize = LANES;
    type Floats = [f32; LANES];
    type Words = [u32; LANES];
    type FourBits = f32;
    type Book = [f32; 16];
    type FiveBits = f32;

    #[inline(always)]
    fn prefetch(_address: *const u8) {}

    #[inline(always)]
    unsafe fn splat(number: f32) -> [f32; LANES] {
        [number; LANES]
    }

    #[inline(always)]
    unsafe fn load(numbers: *const f32) -> [f32; LANES] {
        unsafe { numbers.cast::<[f32; LANES]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(numbers: *mut f32, vector: [f32; LANES]) {
        unsafe { numbers.cast::<[f32; LANES]>().write_unaligned(vector) }
    }

    #[inline(always)]
    unsafe fn half(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }

    #[inline(always)]
    unsafe fn load_f16(numbers: *const u8) -> [f32; LANES] {
        let bits = unsafe { numbers.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    unsafe fn load_words(words: *const u8) -> [u32; LANES] {
        unsafe { words.cast::<[u32; LANES]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_bytes(bytes: *const u8) -> [u32; LANES] {
        unsafe { bytes.cast::<[u8; LANES]>().read_unaligned() }.map(u32::from)
    }

    #[inline(always)]
    unsafe fn load_u16(numbers: *const u8) -> [u32; LANES] {
        unsafe { numbers.cast::<[u16; LANES]>().read_unaligned() }.map(u32::from)
    }

    #[inline(always)]
    unsafe fn add(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|lane| a[lane] + b[lane])
    }

    #[inline(always)]
    unsafe fn sub(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|lane| a[lane] - b[lane])
    }

    #[inline(always)]
    unsafe fn mul(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    unsafe fn mul_add(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        from_fn(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    unsafe fn sum(vector: [f32; LANES]) -> f32 {
        let [a, b, c, d, e, f, g, h] = vector;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    #[inline(always)]
    unsafe fn permute(vector: [f32; LANES], lanes: [u32; LANES]) -> [f32; LANES] {
        lanes.map(|lane| vector[lane as usize % LANES])
    }

    #[inline(always)]
    unsafe fn and(a: [u32; LANES], mask: u32) -> [u32; LANES] {
        a.map(|word| word & mask)
    }

    #[inline(always)]
    unsafe fn shift_left(words: [u32; LANES], count: u32) -> [u32; LANES] {
        words.map(|word| word << count)
    }

    #[inline(always)]
    unsafe fn shift_right(words: [u32; LANES], count: u32) -> [u32; LANES] {
        words.map(|word| word >> count)
    }

    #[inline(always)]
    unsafe fn bits(words: [u32; LANES]) -> [f32; LANES] {
        words.map(f32::from_bits)
    }

    #[inline(always)]
    unsafe fn round_bf16(vector: [f32; LANES]) -> [f32; LANES] {
        vector.map(|number| bf16::from_f32(number).to_f32())
    }

    #[inline(always)]
    unsafe fn round_f16(vector: [f32; LANES]) -> [f32; LANES] {
        vector.map(|number| f16::from_f32(number).to_f32())
    }

    #[inline(always)]
    unsafe fn four_bits(zero: f32) -> f32 {
        zero
    }

    #[inline(always)]
    unsafe fn code_of_4(words: [u32; LANES], index: usize, zero: f32) -> [f32; LANES] {
        unsafe { Self::code(words, index, 4, zero) }
    }

    #[inline(always)]
    unsafe fn book(integers: [i8; 16]) -> [f32; 16] {
        integers.map(f32::from)
    }

    #[inline(always)]
    unsafe fn code_of_book(words: [u32; LANES], index: usize, book: [f32; 16]) -> [f32; LANES] {
        words.map(|word| book[(word >> (4 * index) & 15) as usize])
    }

    #[inline(always)]
    unsafe fn five_bits(zero: f32) -> f32 {
        zero
    }

    #[inline(always)]
    unsafe fn code_of_5(
        words: [u32; LANES],
        top: [u32; LANES],
        index: usize,
        zero: f32,
    ) -> [f32; LANES] {
        unsafe { Self::code_with_top(words, top, index, 1, zero) }
    }

    #[inline(always)]
    unsafe fn code_of_6(
        words: [u32; LANES],
        top: [u32; LANES],
        index: usize,
        zero: f32,
    ) -> [f32; LANES] {
        unsafe { Self::code_with_top(words, top, index, 2, zero) }
    }

    #[inline(always)]
    unsafe fn code_of_8(words: [u32; LANES], index: usize, zero: f32) -> [f32; LANES] {
        unsafe { Self::code(words, index, 8, zero) }
    }
}

impl ShiftedCodes for Portable {
    #[inline(always)]
    unsafe fn or(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        from_fn(|lane| a[lane] | b[lane])
    }

    #[inline(always)]
    unsafe fn float(codes: [u32; LANES], zero: f32) -> [f32; LANES] {
        codes.map(|code| code as f32 - zero)
    }
}
