//! Arithmetic in f32 and f64. If a GPU only approximates a function, the emulator still computes the function
//! accurately, with one rounding.

use super::{ArithmeticOperation as Op, Flags, Rounding};

/// The bits of the NaN that a GPU produces in f32.
pub const CANONICAL_NAN: u32 = 0x7fff_ffff;

/// Returns the bits of a result. Every NaN becomes [`CANONICAL_NAN`].
#[inline(always)]
pub fn single_bits(x: f32) -> u32 {
    if x.is_nan() {
        CANONICAL_NAN
    } else {
        x.to_bits()
    }
}

/// Returns 2ˣ with an error of at most one unit in the last place. Subnormal results are 0.
#[inline(always)]
pub fn exponential(x: f32) -> f32 {
    // Clamping x to the range from −127 to 129 changes no result, because 2ˣ is 0 or infinite outside of this range.
    // With NaN, both comparisons are false, so `x` stays NaN.
    let x = if x > 129.0 { 129.0 } else { x };
    let x = if x < -127.0 { -127.0 } else { x };
    // Adding 1.5 · 2²³ rounds `x` to an integer. The lowest bits of the sum then hold this integer.
    let shifted = x + 12_582_912.0;
    let fraction = x - (shifted - 12_582_912.0);
    // The polynomial approximates 2ᶠ for |f| ≤ ½ with the series of exp(f ln 2).
    let mut sum = 1.525_273_4e-5_f32;
    for coefficient in [
        1.540_353e-4,
        1.333_355_8e-3,
        9.618_129e-3,
        5.550_411e-2,
        2.402_265e-1,
        std::f32::consts::LN_2,
        1.0,
    ] {
        sum = sum.mul_add(fraction, coefficient);
    }
    let exponent = shifted.to_bits().wrapping_sub(0x4b40_0000) as i32;
    // The multiplication by the power of two takes two steps. A single factor could overflow although the result does
    // not.
    let half = exponent >> 1;
    let power = |e: i32| f32::from_bits(((e + 127) << 23) as u32);
    let result = sum * power(half) * power(exponent - half);
    if result < f32::MIN_POSITIVE {
        0.0
    } else {
        result
    }
}

/// Returns the smaller operand. If one operand is NaN, returns the other operand. −0 is smaller than +0.
#[inline(always)]
pub fn min(x: f32, y: f32) -> f32 {
    if x < y || y.is_nan() || (x == y && x.is_sign_negative()) {
        x
    } else {
        y
    }
}

/// Returns the larger operand. If one operand is NaN, returns the other operand. +0 is larger than −0.
#[inline(always)]
pub fn max(x: f32, y: f32) -> f32 {
    if x > y || y.is_nan() || (x == y && x.is_sign_positive()) {
        x
    } else {
        y
    }
}

/// Returns `x`, or a zero with the sign of `x` if `x` is subnormal and `flush` is true.
pub fn flushed(x: f32, flush: bool) -> f32 {
    if flush && x.is_subnormal() {
        0f32.copysign(x)
    } else {
        x
    }
}

pub fn single(operation: Op, flags: Flags, operands: [u64; 4]) -> Option<u64> {
    let [x, y, z, _] = operands.map(|operand| flushed(f32::from_bits(operand as u32), flags.flush));
    if let Some(holds) = is_of_kind(operation, x) {
        return Some(holds.into());
    }
    if operation == Op::Reduce {
        let rounded = (x.to_bits() & 0x7fff_ffff).wrapping_add(0x1000) & !0x1fff;
        let signed = f32::from_bits(rounded).copysign(x).to_bits();
        return Some(if x.is_nan() { CANONICAL_NAN } else { signed }.into());
    }
    // Negation and absolute value change only the sign bit, so a NaN keeps its other bits.
    match operation {
        Op::Negate => return Some((-x).to_bits().into()),
        Op::Absolute => return Some(x.abs().to_bits().into()),
        Op::CopySign => return Some(y.copysign(x).to_bits().into()),
        _ => {}
    }
    let result = match (operation, flags.rounding) {
        (Op::Add, Rounding::Nearest) => x + y,
        (Op::Subtract, Rounding::Nearest) => x - y,
        (Op::Multiply, Rounding::Nearest) => x * y,
        (Op::MultiplyAdd, Rounding::Nearest) => x.mul_add(y, z),
        (Op::Divide, Rounding::Nearest) => x / y,
        (Op::SquareRoot, Rounding::Nearest) => x.sqrt(),
        (Op::Reciprocal, Rounding::Nearest) => 1.0 / x,
        (Op::Exponential2, Rounding::Nearest) => x.exp2(),
        (_, Rounding::Nearest) => real(operation, flags, [x.into(), y.into(), z.into()])? as f32,
        (Op::Add, rounding) => directed_sum(x.into(), y.into(), rounding),
        (Op::Subtract, rounding) => directed_sum(x.into(), (-y).into(), rounding),
        (Op::Multiply, rounding) => directed(f64::from(x) * f64::from(y), 0.0, rounding),
        (Op::MultiplyAdd, rounding) => {
            directed_sum(f64::from(x) * f64::from(y), z.into(), rounding)
        }
        _ => return None,
    };
    let result = flags.limited(flushed(result, flags.flush).into());
    Some(single_bits(result as f32).into())
}

pub fn double(operation: Op, flags: Flags, operands: [u64; 4]) -> Option<u64> {
    if flags.rounding != Rounding::Nearest || flags.flush || flags.saturate || flags.relu {
        return None;
    }
    let [x, y, z, _] = operands.map(f64::from_bits);
    let result = real(operation, flags, [x, y, z])?;
    Some(result.to_bits())
}

/// Computes an operation in f64, or returns `None` if it is not supported.
pub fn real(operation: Op, flags: Flags, [x, y, z]: [f64; 3]) -> Option<f64> {
    let undefined = flags.keep_nan && (x.is_nan() || y.is_nan());
    Some(match operation {
        Op::Add => x + y,
        Op::Subtract => x - y,
        Op::Multiply => x * y,
        Op::MultiplyAdd => x.mul_add(y, z),
        Op::Divide => x / y,
        Op::Min | Op::Max if undefined => f64::NAN,
        Op::Min | Op::Max if x == y => {
            let wants_negative = operation == Op::Min;
            if x.is_sign_negative() == wants_negative {
                x
            } else {
                y
            }
        }
        Op::Min => x.min(y),
        Op::Max => x.max(y),
        Op::Negate => -x,
        Op::Absolute => x.abs(),
        Op::CopySign => y.copysign(x),
        Op::Exponential2 => x.exp2(),
        Op::Logarithm2 => x.log2(),
        Op::Reciprocal => 1.0 / x,
        Op::SquareRoot => x.sqrt(),
        Op::ReciprocalSquareRoot => 1.0 / x.sqrt(),
        Op::Sine => x.sin(),
        Op::Cosine => x.cos(),
        Op::HyperbolicTangent => x.tanh(),
        _ => return None,
    })
}

fn is_of_kind(operation: Op, x: f32) -> Option<bool> {
    Some(match operation {
        Op::IsFinite => x.is_finite(),
        Op::IsInfinite => x.is_infinite(),
        Op::IsNumber => !x.is_nan(),
        Op::IsNotNumber => x.is_nan(),
        Op::IsNormal => x.is_normal(),
        Op::IsSubnormal => x.is_subnormal(),
        _ => return None,
    })
}

/// Returns `x + y` in f32, rounded once in the direction `rounding`.
fn directed_sum(x: f64, y: f64, rounding: Rounding) -> f32 {
    let (sum, lack) = sum_and_lack(x, y);
    let of_opposites = x.is_sign_negative() != y.is_sign_negative();
    if sum == 0.0 && of_opposites && rounding == Rounding::Down {
        return -0.0;
    }
    directed(sum, lack, rounding)
}

/// Returns the f64 sum and its rounding error (the exact sum minus the f64 sum), by Knuth's two-sum.
fn sum_and_lack(x: f64, y: f64) -> (f64, f64) {
    let sum = x + y;
    let of_y = sum - x;
    (sum, (x - (sum - of_y)) + (y - of_y))
}

/// Returns `x + y` in f64, rounded to odd: the last bit is set if the f64 is inexact. Rounding this value to a narrower
/// type then equals a single rounding of the exact sum.
pub fn sum_to_odd(x: f64, y: f64) -> f64 {
    let (sum, lack) = sum_and_lack(x, y);
    if !sum.is_finite() || lack == 0.0 || sum.to_bits() & 1 != 0 {
        sum
    } else if lack > 0.0 {
        sum.next_up()
    } else {
        sum.next_down()
    }
}

/// Rounds `x + lack` to f32 in the direction `rounding`. `lack` is less than half a unit in the last place of `x`.
pub fn directed(x: f64, lack: f64, rounding: Rounding) -> f32 {
    let near = x as f32;
    if x.is_nan() || x.is_infinite() || rounding == Rounding::Nearest {
        return near;
    }
    let value = f64::from(near);
    let lack = if lack.is_nan() { 0.0 } else { lack };
    let (too_large, too_small) = (
        value > x || (value == x && lack < 0.0),
        value < x || (value == x && lack > 0.0),
    );
    let wants_less = match rounding {
        Rounding::Down => true,
        Rounding::Up => false,
        _ => x > 0.0 || (x == 0.0 && lack > 0.0),
    };
    match (too_large, too_small, wants_less) {
        (true, _, true) => near.next_down(),
        (_, true, false) => near.next_up(),
        _ => near,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(x: f32) -> u64 {
        x.to_bits().into()
    }

    fn directed_fma(rounding: Rounding, x: f32, y: f32, z: f32) -> f32 {
        let flags = Flags {
            rounding,
            ..Flags::default()
        };
        let operands = [bits(x), bits(y), bits(z), 0];
        f32::from_bits(single(Op::MultiplyAdd, flags, operands).unwrap() as u32)
    }

    #[test]
    fn exponential_error_is_below_its_bound() {
        for k in -13_000..13_000 {
            let x = k as f32 * 0.01;
            let (near, exact) = (exponential(x), f64::from(x).exp2());
            if exact >= f64::from(f32::MIN_POSITIVE) && exact < f64::from(f32::MAX) {
                let error = (f64::from(near) - exact).abs() / exact;
                assert!(error < 1.5e-7, "{x}: {error:e}");
            }
        }
        assert_eq!(exponential(f32::NEG_INFINITY), 0.0);
        assert_eq!(exponential(f32::INFINITY), f32::INFINITY);
        assert_eq!(exponential(128.0), f32::INFINITY);
        assert_eq!(exponential(-127.0), 0.0);
        assert_eq!(exponential(0.0), 1.0);
        assert!(exponential(f32::NAN).is_nan());
    }

    #[test]
    fn directed_roundings_keep_their_direction() {
        let tiny = 2f32.powi(-40);
        assert_eq!(directed_fma(Rounding::Down, 1.0, 1.0, tiny), 1.0);
        assert_eq!(directed_fma(Rounding::Up, 1.0, 1.0, tiny), 1f32.next_up());
        assert_eq!(
            directed_fma(Rounding::Down, 1.0, 1.0, -tiny),
            1f32.next_down()
        );
        assert_eq!(
            directed_fma(Rounding::TowardZero, -1.0, 1.0, tiny),
            -(1f32.next_down())
        );
        // The exact sum is x · (−x) + 2⁶⁰. The product is about −1, which is less than half a unit in the last place of
        // 2⁶⁰ in f64. If the sum were first rounded to f64, it would be 2⁶⁰. Rounding 2⁶⁰ down to f32 would change
        // nothing.
        let x = 1f32.next_up();
        assert_eq!(
            directed_fma(Rounding::Down, x, -x, 2f32.powi(60)),
            2f32.powi(60).next_down()
        );
        assert_eq!(
            directed_fma(Rounding::Down, 1.0, 3.0, -3.0).to_bits(),
            (-0f32).to_bits()
        );
        assert_eq!(
            directed_fma(Rounding::Up, f32::MAX, 2.0, 0.0),
            f32::INFINITY
        );
        assert_eq!(directed_fma(Rounding::Down, f32::MAX, 2.0, 0.0), f32::MAX);
    }

    #[test]
    fn min_and_max_prefer_numbers_to_nan() {
        assert_eq!(min(f32::NAN, 1.0), 1.0);
        assert_eq!(max(1.0, f32::NAN), 1.0);
        assert!(min(f32::NAN, f32::NAN).is_nan());
        assert!(min(0.0, -0.0).is_sign_negative());
        assert!(max(-0.0, 0.0).is_sign_positive());
    }

    #[test]
    fn tf32_rounding_breaks_ties_away_from_zero() {
        let of = |x: f32| {
            let reduced = single(Op::Reduce, Flags::default(), [bits(x), 0, 0, 0]);
            f32::from_bits(reduced.unwrap() as u32)
        };
        assert_eq!(of(1.0 + 2f32.powi(-11)), 1.0 + 2f32.powi(-10));
        assert_eq!(of(-1.0 - 2f32.powi(-11)), -1.0 - 2f32.powi(-10));
        assert_eq!(of(1.0 + 2f32.powi(-12)), 1.0);
        assert_eq!(of(f32::MAX), f32::INFINITY);
        assert!(of(f32::NAN).is_nan());
    }

    #[test]
    fn subnormals_are_flushed_on_request() {
        let flags = Flags {
            flush: true,
            ..Flags::default()
        };
        let small = f32::MIN_POSITIVE / 2.0;
        assert_eq!(single(Op::Add, flags, [bits(-small), 0, 0, 0]), Some(0));
        assert_eq!(
            single(Op::Negate, flags, [bits(small), 0, 0, 0]),
            Some(bits(-0.0))
        );
    }
}
