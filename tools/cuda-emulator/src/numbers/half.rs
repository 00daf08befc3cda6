//! Arithmetic in 16-bit floats, called halves here: f16 (IEEE) and bf16, which has the upper 16 bits of an f32.

use super::{ArithmeticOperation as Op, Flags, Rounding, float};
use crate::ptx::Type;

/// The bits of the NaN that a GPU produces in 16-bit floats.
const NAN: u16 = 0x7fff;

#[inline(always)]
pub fn from_brain(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
pub fn from_half(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let (sign, rest) = (bits >> 15 << 31, bits & 0x7fff);
    // The multiplication by 2¹¹² corrects the exponent, because the exponent bias of f32 (127) exceeds the exponent
    // bias of f16 (15) by 112. This multiplication also converts subnormals correctly.
    let scaled = f32::from_bits(rest << 13) * f32::from_bits(0x7780_0000);
    let magnitude = if rest >= 0x7c00 {
        0x7f80_0000 | rest << 13
    } else {
        scaled.to_bits()
    };
    f32::from_bits(sign | magnitude)
}

/// Converts an f32 to bf16, rounded to nearest, ties to even.
#[inline(always)]
pub fn to_brain(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { NAN } else { rounded as u16 }
}

/// Converts an f32 to f16, rounded to nearest, ties to even.
#[inline(always)]
pub fn to_half(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let magnitude = x.abs();
    let bits = magnitude.to_bits();
    // A subnormal f16 is a multiple of 2⁻²⁴, and the last bit of an f32 between ½ and 1 is worth 2⁻²⁴. After adding ½, the
    // low bits of the sum are therefore `magnitude / 2⁻²⁴`, rounded to an integer.
    let subnormal = (magnitude + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let normal = bits
        .wrapping_add(0xfff + (bits >> 13 & 1))
        .wrapping_sub(112 << 23)
        >> 13;
    let rounded = if magnitude < f32::from_bits(113 << 23) {
        subnormal
    } else if magnitude >= 65520.0 {
        0x7c00
    } else {
        normal
    };
    if x.is_nan() {
        NAN
    } else {
        sign | rounded as u16
    }
}

/// Converts a half of type `number`, f16 or bf16, to f32.
#[inline(always)]
pub fn half_to_single(number: Type, bits: u16) -> f32 {
    match number {
        Type::F16 | Type::F16x2 => from_half(bits),
        _ => from_brain(bits),
    }
}

/// Converts an f32 to a half of type `number`, f16 or bf16.
#[inline(always)]
pub fn single_to_half(number: Type, x: f32) -> u16 {
    match number {
        Type::F16 | Type::F16x2 => to_half(x),
        _ => to_brain(x),
    }
}

/// Converts an f64 to f16 or bf16 with a single rounding. A conversion to f32 first would round twice.
pub fn double_to_half(number: Type, x: f64, rounding: Rounding) -> u16 {
    match rounding {
        Rounding::Nearest => single_to_half(number, to_odd(x)),
        _ => directed(number, x, rounding),
    }
}

/// Rounds to f32 toward zero, and sets the last bit if the f32 is inexact (round to odd). Rounding this value to a half
/// then equals a single rounding of `x`.
fn to_odd(x: f64) -> f32 {
    let near = x as f32;
    if x.is_nan() || f64::from(near) == x {
        return near;
    }
    let toward_zero = if f64::from(near).abs() > x.abs() {
        near.to_bits() - 1
    } else {
        near.to_bits()
    };
    f32::from_bits(toward_zero | 1)
}

/// Rounds `x` to a half in the direction `rounding`. The function first finds the nearest half. If the nearest half
/// lies on the wrong side of `x`, the function returns the next half in the direction `rounding`.
fn directed(number: Type, x: f64, rounding: Rounding) -> u16 {
    let near = double_to_half(number, x, Rounding::Nearest);
    let value = f64::from(half_to_single(number, near));
    if x.is_nan() || value == x {
        return near;
    }
    let wants_less = match rounding {
        Rounding::Down => true,
        Rounding::Up => false,
        _ => x > 0.0,
    };
    match (value > x, wants_less) {
        (true, true) if near == 0 => 0x8001,
        (false, false) if near == 0x8000 => 1,
        // Adding 1 to the bits of a float, or subtracting 1, gives the next float, because the bits increase with the
        // magnitude.
        (true, true) => near.wrapping_add_signed(if value > 0.0 { -1 } else { 1 }),
        (false, false) => near.wrapping_add_signed(if value < 0.0 { -1 } else { 1 }),
        _ => near,
    }
}

/// Computes an operation on one half, or on two packed halves. The halves are in the low bits of the operands.
pub fn half(operation: Op, number: Type, flags: Flags, operands: [u64; 4]) -> Option<u64> {
    let part = |shift: u32| {
        let operands = operands.map(|operand| (operand >> shift) as u16);
        single_half(operation, number, flags, operands).map(|result| u64::from(result) << shift)
    };
    match number {
        Type::F16x2 | Type::BF16x2 => Some(part(0)? | part(16)?),
        _ => part(0),
    }
}

fn single_half(operation: Op, number: Type, flags: Flags, operands: [u16; 4]) -> Option<u16> {
    match operation {
        Op::Negate => return Some(operands[0] ^ 0x8000),
        Op::Absolute => return Some(operands[0] & 0x7fff),
        _ => {}
    }
    // The emulator supports no flushing of subnormals and no directed rounding for halves.
    if flags.flush || flags.rounding != Rounding::Nearest {
        return None;
    }
    // A product of two halves is exact in f64. A sum is rounded to odd in f64, so that the result is as accurate as
    // with a single rounding.
    let [x, y, z, _] = operands.map(|operand| f64::from(half_to_single(number, operand)));
    let result = match operation {
        Op::Add => float::sum_to_odd(x, y),
        Op::Subtract => float::sum_to_odd(x, -y),
        Op::MultiplyAdd => float::sum_to_odd(x * y, z),
        _ => float::real(operation, flags, [x, y, z])?,
    };
    let result = flags.limited(result);
    Some(double_to_half(number, result, Rounding::Nearest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_round_trips_through_f32() {
        for bits in 0..=u16::MAX {
            let x = from_half(bits);
            let expected = match bits & 0x7fff {
                0x7c01.. => assert_nan(x),
                0x7c00 => f32::INFINITY,
                rest if rest < 0x400 => f32::from(rest) * 2f32.powi(-24),
                rest => {
                    let mantissa = f32::from(rest & 0x3ff) / 1024.0 + 1.0;
                    mantissa * 2f32.powi(i32::from(rest >> 10) - 15)
                }
            };
            if !x.is_nan() {
                assert_eq!(x.abs(), expected, "{bits:#x}");
                assert_eq!(x.is_sign_negative(), bits >= 0x8000);
                assert_eq!(to_half(x), bits);
            }
            let brain = from_brain(bits);
            if !brain.is_nan() {
                assert_eq!(to_brain(brain), bits);
            }
        }
    }

    fn assert_nan(x: f32) -> f32 {
        assert!(x.is_nan());
        x
    }

    #[test]
    fn halves_round_to_nearest_even() {
        for (x, expected) in [
            (1.0 + 2f32.powi(-11), 0x3c00),
            (1.0 + 3.0 * 2f32.powi(-11), 0x3c02),
            (65519.0, 0x7bff),
            (65520.0, 0x7c00),
            (2f32.powi(-25), 0),
            (1.5 * 2f32.powi(-25), 1),
            (3.0 * 2f32.powi(-25), 2),
            (1023.75 * 2f32.powi(-24), 0x400),
            (f32::NAN, 0x7fff),
            (f32::NEG_INFINITY, 0xfc00),
            (-0.0, 0x8000),
        ] {
            assert_eq!(to_half(x), expected, "{x:e}");
        }
        for (x, expected) in [
            (1.0 + 2f32.powi(-8), 0x3f80),
            (1.0 + 3.0 * 2f32.powi(-8), 0x3f82),
            (f32::MAX, 0x7f80),
            (f32::NAN, 0x7fff),
        ] {
            assert_eq!(to_brain(x), expected, "{x:e}");
        }
    }

    #[test]
    fn conversion_from_f64_rounds_once() {
        // The f64 `x` lies just above a tie between two halves, so `x` rounds up. A conversion to f32 first would round `x`
        // to the tie, and the tie would then round down to the even half.
        let x = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(double_to_half(Type::F16, x, Rounding::Nearest), 0x3c01);
        assert_eq!(double_to_half(Type::F16, x, Rounding::TowardZero), 0x3c00);
        assert_eq!(double_to_half(Type::F16, -x, Rounding::Down), 0xbc01);
        assert_eq!(double_to_half(Type::F16, -1e-30, Rounding::Down), 0x8001);
        assert_eq!(double_to_half(Type::F16, 1e9, Rounding::TowardZero), 0x7bff);
        assert_eq!(
            double_to_half(Type::F16, 1e300, Rounding::TowardZero),
            0x7bff
        );
    }
}
