//! Conversions of a value from one PTX type to another.

use super::half::double_to_half;
use super::{Rounding, extend, float, half_to_single, saturated, single_bits, truncate};
use crate::ptx::Type;

/// A conversion, with the modifiers of the `cvt` instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conversion {
    pub to: Type,
    pub from: Type,
    /// The rounding direction if the target type is a float that cannot represent the value exactly.
    pub rounding: Rounding,
    /// The direction in which the value is first rounded to an integer, or `None` if the conversion has no such step.
    /// Even with this step, the target type may be a float.
    pub to_integer: Option<Rounding>,
    pub flush: bool,
    pub saturate: bool,
}

/// Converts the value in `bits` and returns the bits of the result.
pub fn convert(conversion: Conversion, bits: u64) -> u64 {
    let Conversion { to, from, .. } = conversion;
    match (from.is_float(), to.is_float()) {
        (true, true) => float_to_float(conversion, bits),
        (true, false) => to_integer(conversion, real(conversion, bits)),
        (false, true) => integer_to_float(conversion, extend(from, bits)),
        (false, false) => {
            let value = extend(from, bits);
            let value = if conversion.saturate {
                clamp(to, value)
            } else {
                value
            };
            in_register(to, value as u64)
        }
    }
}

/// Returns the bits of a value as a register holds them. A signed value of less than 32 bits is sign-extended to 32
/// bits.
fn in_register(number: Type, bits: u64) -> u64 {
    if number.is_signed() && number.bits() < 32 {
        truncate(Type::B32, extend(number, bits) as u64)
    } else {
        truncate(number, bits)
    }
}

fn real(conversion: Conversion, bits: u64) -> f64 {
    match conversion.from {
        Type::F64 => f64::from_bits(bits),
        Type::F32 => float::flushed(f32::from_bits(bits as u32), conversion.flush).into(),
        half => half_to_single(half, bits as u16).into(),
    }
}

fn integral(x: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => x.round_ties_even(),
        Rounding::TowardZero => x.trunc(),
        Rounding::Down => x.floor(),
        Rounding::Up => x.ceil(),
    }
}

fn float_to_float(conversion: Conversion, bits: u64) -> u64 {
    let x = real(conversion, bits);
    let x = match conversion.to_integer {
        Some(rounding) => integral(x, rounding),
        None => x,
    };
    let x = if conversion.saturate { saturated(x) } else { x };
    match conversion.to {
        Type::F64 => x.to_bits(),
        Type::F32 => {
            let near = float::directed(x, 0.0, conversion.rounding);
            single_bits(float::flushed(near, conversion.flush)).into()
        }
        half => double_to_half(half, x, conversion.rounding).into(),
    }
}

fn range(number: Type) -> (i128, i128) {
    if number.is_signed() {
        let end = 1i128 << (number.bits() - 1);
        (-end, end - 1)
    } else {
        (0, (1i128 << number.bits()) - 1)
    }
}

fn clamp(number: Type, value: i128) -> i128 {
    let (low, high) = range(number);
    value.clamp(low, high)
}

/// Converts a float to an integer. A value out of range becomes the nearest bound of the integer type. NaN becomes 0 in
/// types of at most 32 bits. In 64-bit types, NaN becomes the number with only the highest bit set.
fn to_integer(conversion: Conversion, x: f64) -> u64 {
    let to = conversion.to;
    if x.is_nan() {
        return if to.bits() == 64 { 1 << 63 } else { 0 };
    }
    let rounding = conversion.to_integer.unwrap_or(Rounding::TowardZero);
    in_register(to, clamp(to, integral(x, rounding) as i128) as u64)
}

fn integer_to_float(conversion: Conversion, value: i128) -> u64 {
    // `near` is `value` as f64, which is inexact only for integers of more than 53 bits. `lack` is `value` minus
    // `near`. The final rounding needs `lack`.
    let near = value as f64;
    let lack = (value - near as i128) as f64;
    match conversion.to {
        Type::F64 => near.to_bits(),
        Type::F32 if conversion.rounding == Rounding::Nearest => (value as f32).to_bits().into(),
        Type::F32 => float::directed(near, lack, conversion.rounding)
            .to_bits()
            .into(),
        half => double_to_half(half, float::sum_to_odd(near, lack), conversion.rounding).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(to: Type, from: Type, bits: u64) -> u64 {
        convert(
            Conversion {
                to,
                from,
                rounding: Rounding::Nearest,
                to_integer: None,
                flush: false,
                saturate: false,
            },
            bits,
        )
    }

    fn single(x: f32) -> u64 {
        x.to_bits().into()
    }

    #[test]
    fn floats_out_of_range_become_the_integer_bounds() {
        for (x, to, expected) in [
            (-1.5, Type::U32, 0),
            (5e9, Type::U32, 0xffff_ffff),
            (5e9, Type::S32, 0x7fff_ffff),
            (-5e9, Type::S32, 0x8000_0000),
            (-1.9, Type::S32, 0xffff_ffff),
            (f32::NAN, Type::S32, 0),
            (f32::NAN, Type::S64, 1 << 63),
            (f32::INFINITY, Type::S64, i64::MAX as u64),
            (300.0, Type::U8, 255),
        ] {
            assert_eq!(of(to, Type::F32, single(x)), expected, "{x} to {to:?}");
        }
    }

    #[test]
    fn integers_round_to_floats_once() {
        assert_eq!(
            of(Type::F32, Type::U32, 0xffff_ffff),
            single(4_294_967_296.0)
        );
        assert_eq!(of(Type::F32, Type::S32, 0xffff_ffff), single(-1.0));
        // The integer `x` lies just above a tie between two f32 values, so `x` rounds up. A conversion to f64 first would
        // round `x` to the tie, and the tie would then round down to the even f32.
        let x = (1u64 << 60) + (1 << 36) + 1;
        assert_eq!(
            of(Type::F32, Type::U64, x),
            single(2f32.powi(60)).wrapping_add(1)
        );
        assert_eq!(of(Type::F16, Type::S32, 2049), 0x6800);
        assert_eq!(of(Type::F16, Type::U32, 1 << 20), 0x7c00);
    }

    #[test]
    fn integers_narrow_and_widen() {
        assert_eq!(of(Type::S64, Type::S32, 0xffff_ffff), u64::MAX);
        assert_eq!(of(Type::U64, Type::U32, u64::MAX), 0xffff_ffff);
        assert_eq!(of(Type::S8, Type::S32, 0x80), 0xffff_ff80);
        assert_eq!(of(Type::U16, Type::U32, 0x12345), 0x2345);
        assert_eq!(of(Type::U32, Type::S16, 0x8000), 0xffff_8000);
    }

    #[test]
    fn conversions_round_in_their_direction_and_saturate() {
        let conversion = Conversion {
            to: Type::F32,
            from: Type::F32,
            rounding: Rounding::Nearest,
            to_integer: Some(Rounding::Nearest),
            flush: false,
            saturate: false,
        };
        assert_eq!(convert(conversion, single(2.5)), single(2.0));
        let down = Conversion {
            to_integer: Some(Rounding::Down),
            to: Type::S32,
            ..conversion
        };
        assert_eq!(convert(down, single(-0.5)), 0xffff_ffff);
        let saturated = Conversion {
            to_integer: None,
            saturate: true,
            ..conversion
        };
        assert_eq!(convert(saturated, single(1.5)), single(1.0));
        assert_eq!(convert(saturated, single(f32::NAN)), 0);
        let toward_zero = Conversion {
            from: Type::F64,
            rounding: Rounding::TowardZero,
            ..saturated
        };
        assert_eq!(
            convert(toward_zero, 0.1f64.to_bits()),
            single(0.1f32.next_down())
        );
    }
}
