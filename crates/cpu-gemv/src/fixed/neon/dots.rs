//! Dot products of signed bytes, for each instruction set.

use std::arch::{aarch64::*, asm};

/// Dot products of signed bytes.
pub(crate) trait Dots {
    /// Adds the products of two vectors of codes with two vectors of limbs to `sum`. A lane of the result has the
    /// products of its own four bytes. If `IS_SMALL` is false, a lane may have the products of other bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set. If `IS_SMALL` is true, the codes are between -32 and 32.
    unsafe fn dot<const IS_SMALL: bool>(
        sum: int32x4_t,
        codes: [int8x16_t; 2],
        limbs: [int8x16_t; 2],
    ) -> int32x4_t;
}

/// NEON without an extension.
pub(crate) struct Plain;

impl Dots for Plain {
    #[inline(always)]
    unsafe fn dot<const IS_SMALL: bool>(
        sum: int32x4_t,
        codes: [int8x16_t; 2],
        limbs: [int8x16_t; 2],
    ) -> int32x4_t {
        unsafe {
            if IS_SMALL {
                // A sum of two products is at most 2 · 32 · 128, and an element of the pairwise sum at most 2¹⁴.
                let low = vmull_s8(vget_low_s8(codes[0]), vget_low_s8(limbs[0]));
                let low = vmlal_s8(low, vget_low_s8(codes[1]), vget_low_s8(limbs[1]));
                let high = vmull_high_s8(codes[0], limbs[0]);
                let high = vmlal_high_s8(high, codes[1], limbs[1]);
                return vpadalq_s16(sum, vpaddq_s16(low, high));
            }
            let mut sum = sum;
            for (codes, limbs) in codes.into_iter().zip(limbs) {
                sum = vpadalq_s16(sum, vmull_s8(vget_low_s8(codes), vget_low_s8(limbs)));
                sum = vpadalq_s16(sum, vmull_high_s8(codes, limbs));
            }
            sum
        }
    }
}

/// NEON with the extension DotProd.
pub(crate) struct Sdot;

impl Dots for Sdot {
    #[inline(always)]
    unsafe fn dot<const IS_SMALL: bool>(
        sum: int32x4_t,
        codes: [int8x16_t; 2],
        limbs: [int8x16_t; 2],
    ) -> int32x4_t {
        unsafe { sdot(sdot(sum, codes[0], limbs[0]), codes[1], limbs[1]) }
    }
}

/// Adds the products of the four bytes of each lane to `sum`. The standard library's function for this instruction is
/// unstable in Rust 1.95.
///
/// # Safety
/// The CPU has the extension DotProd.
#[inline(always)]
unsafe fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Multiplies two rows `a` of 8 bytes by two rows `b` of 8 bytes, and adds the products to `sum`, `[a, b]`. The
/// standard library's function for this instruction is unstable in Rust 1.95.
///
/// # Safety
/// The CPU has the extension I8MM.
#[inline(always)]
pub(super) unsafe fn smmla(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    unsafe {
        asm!(
            "smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}
