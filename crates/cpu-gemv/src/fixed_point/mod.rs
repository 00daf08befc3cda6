//! Input rows in fixed point, for the kernels of [`fixed`](crate::fixed).
//!
//! A *block* is 32 columns. An element of a block is `x = X · unit`, where `X` is an integer of 24 bits and the unit is
//! a power of two. `X` is three signed bytes, the *limbs*: `X = 65536 · a + 256 · b + c`.
//!
//! An element moves by less than 2⁻²² of the largest element of its block, or by at most 2⁻¹²⁸. A block with an element that is infinite or
//! NaN has the unit NaN.

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Fixed, Form, STEP, Step};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::{Fixed, Form, STEP};

/// The number of columns of a block. The elements of a block have one unit.
pub(crate) const BLOCK: usize = 32;

/// The largest sum of three limbs: `127 · (65536 + 256 + 1)`. A block's largest element is at most this number of
/// units.
const LARGEST: u32 = 0x7f_7f7f;
/// This number is added to the bits of an f32. The sum has the next exponent if the f32 is more than [`LARGEST`] times
/// a power of two.
const TO_NEXT_EXPONENT: u32 = 0x80_0000 - 2 * (LARGEST - 0x40_0000) - 1;
/// The smallest biased exponent from which a unit follows. If a block's largest element is below 2⁻¹⁰⁵, the unit is
/// 2⁻¹²⁷.
const SMALLEST_EXPONENT: u32 = 22;
/// The bits of infinity.
const INFINITY: u32 = 0x7f80_0000;
/// The number that makes each limb of an integer an unsigned byte when it is added to the integer: 128 in each byte.
const LIMB_OFFSET: i32 = 0x80_8080;

/// The unit of a block.
#[derive(Clone, Copy, Debug)]
struct Unit {
    /// The unit times 65536, which is a normal number, or NaN.
    times_65536: f32,
    /// The reciprocal of the unit.
    reciprocal: f32,
}

impl Unit {
    /// Returns the unit of a block whose largest absolute value has the bits `largest`.
    fn of(largest: u32) -> Self {
        let exponent = ((largest + TO_NEXT_EXPONENT) >> 23).max(SMALLEST_EXPONENT);
        Self {
            times_65536: match largest < INFINITY {
                true => f32::from_bits((exponent - 6) << 23),
                false => f32::NAN,
            },
            reciprocal: f32::from_bits((276 - exponent) << 23),
        }
    }
}
