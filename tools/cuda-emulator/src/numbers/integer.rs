//! Arithmetic on integers, bits and predicates.

use super::{ArithmeticOperation as Op, Flags, extend, truncate};
use crate::ptx::Type;

pub fn predicate(operation: Op, [a, b, ..]: [u64; 4]) -> Option<u64> {
    Some(match operation {
        Op::And => a & b,
        Op::Or => a | b,
        Op::Xor => a ^ b,
        Op::Not => !a & 1,
        _ => return None,
    })
}

pub fn integer(operation: Op, number: Type, flags: Flags, operands: [u64; 4]) -> Option<u64> {
    let plain = Flags {
        saturate: flags.saturate,
        wrap: flags.wrap,
        relu: flags.relu,
        ..Flags::default()
    };
    let saturates = matches!(operation, Op::Add | Op::Subtract) && number == Type::S32;
    let wraps = matches!(operation, Op::FunnelLeft | Op::FunnelRight | Op::HighestBit);
    let has_relu = matches!(operation, Op::Min | Op::Max) && number == Type::S32;
    if flags != plain
        || flags.relu && !has_relu
        || flags.saturate && !saturates
        || flags.wrap && !wraps
    {
        return None;
    }
    let [a, b, c, d] = operands;
    let (x, y, z) = (extend(number, a), extend(number, b), extend(number, c));
    let (ua, ub, uc) = (
        truncate(number, a),
        truncate(number, b),
        truncate(number, c),
    );
    let bits = number.bits();
    // The 128-bit arithmetic can overflow only in bits that the result does not contain.
    let exact = match operation {
        Op::Add | Op::Subtract => {
            let sum = if operation == Op::Add { x + y } else { x - y };
            if flags.saturate {
                sum.clamp(i32::MIN.into(), i32::MAX.into())
            } else {
                sum
            }
        }
        Op::Multiply => x.wrapping_mul(y),
        Op::MultiplyAdd => x.wrapping_mul(y).wrapping_add(z),
        Op::MultiplyHigh => high(number, ua, ub, x, y),
        Op::MultiplyAddHigh => high(number, ua, ub, x, y) + z,
        Op::MultiplyWide | Op::MultiplyAddWide if bits < 64 => {
            let addend = if operation == Op::MultiplyAddWide {
                c
            } else {
                0
            };
            let wide = (x * y) as u64;
            let sum = wide.wrapping_add(addend);
            return Some(if bits == 16 { sum & 0xffff_ffff } else { sum });
        }
        // CUDA leaves a division by 0 undefined. NVIDIA's GPUs return a quotient with all bits set.
        Op::Divide if y == 0 => -1,
        Op::Remainder if y == 0 => x,
        // The division uses 64-bit integers, because the CPU has no instruction that divides 128-bit integers.
        Op::Divide if number.is_signed() => (x as i64).wrapping_div(y as i64).into(),
        Op::Remainder if number.is_signed() => (x as i64).wrapping_rem(y as i64).into(),
        Op::Divide => (ua / ub).into(),
        Op::Remainder => (ua % ub).into(),
        Op::Min if flags.relu => x.min(y).max(0),
        Op::Max if flags.relu => x.max(y).max(0),
        Op::Min => x.min(y),
        Op::Max => x.max(y),
        Op::Absolute => x.abs(),
        Op::Negate => -x,
        Op::And => x & y,
        Op::Or => x | y,
        Op::Xor => x ^ y,
        Op::Not => !x,
        Op::IsZero => (ua == 0).into(),
        // A shift amount is a 32-bit value. An amount beyond the operand's width shifts out all bits.
        Op::ShiftLeft => match b as u32 {
            amount if amount >= bits => 0,
            amount => x << amount,
        },
        Op::ShiftRight => x >> (b as u32).min(64),
        Op::CountOnes => ua.count_ones().into(),
        Op::LeadingZeros => (ua.leading_zeros() - (64 - bits)).into(),
        Op::ReverseBits => (ua.reverse_bits() >> (64 - bits)).into(),
        Op::HighestBit => {
            let of = if x < 0 { !x } else { x } as u64;
            return Some(match (of, flags.wrap) {
                (0, _) => 0xffff_ffff,
                (of, false) => 63 - u64::from(of.leading_zeros()),
                (of, true) => u64::from(of.leading_zeros()) - u64::from(64 - bits),
            });
        }
        Op::ExtractBits => extract(number, x, b as u32 & 255, c as u32 & 255),
        Op::InsertBits => insert(bits, ua, ub, c as u32 & 255, d as u32 & 255).into(),
        Op::PermuteBytes if bits == 32 => permute(ua | ub << 32, c).into(),
        Op::Logic3 if bits == 32 => logic3(ua, ub, uc, d).into(),
        Op::FunnelLeft | Op::FunnelRight if bits == 32 => {
            let amount = match flags.wrap {
                true => c & 31,
                false => (c & 0xffff_ffff).min(32),
            };
            let both = ua | ub << 32;
            let shifted = if operation == Op::FunnelLeft {
                (u128::from(both) << amount >> 32) as u64
            } else {
                both >> amount
            };
            shifted.into()
        }
        Op::AbsoluteDifferenceAdd => (x - y).abs() + z,
        Op::DotBytes if bits == 32 => dot_bytes(number, a, b) + z,
        _ => return None,
    };
    Some(truncate(number, exact as u64))
}

fn high(number: Type, ua: u64, ub: u64, x: i128, y: i128) -> i128 {
    if number.is_signed() {
        (x * y) >> number.bits()
    } else {
        ((u128::from(ua) * u128::from(ub)) >> number.bits()) as i128
    }
}

fn extract(number: Type, x: i128, position: u32, length: u32) -> i128 {
    if length == 0 {
        return 0;
    }
    let field = x >> position.min(64);
    if length >= number.bits() {
        return field;
    }
    if number.is_signed() {
        // The sign of a signed bit field is the highest bit of the field. If the field extends beyond the operand, the sign
        // is the operand's highest bit.
        field << (128 - length) >> (128 - length)
    } else {
        field & ((1 << length) - 1)
    }
}

fn insert(bits: u32, field: u64, into: u64, position: u32, length: u32) -> u64 {
    if position >= bits || length == 0 {
        return into;
    }
    let ones = match length {
        64.. => u64::MAX,
        length => (1 << length) - 1,
    };
    let mask = ones << position;
    into & !mask | field << position & mask
}

fn permute(bytes: u64, selectors: u64) -> u64 {
    (0..4).fold(0, |result, k| {
        let selector = selectors >> (4 * k) & 15;
        let byte = bytes >> (8 * (selector & 7)) & 255;
        let byte = match selector & 8 {
            0 => byte,
            // If bit 3 of the selector is set, all eight bits of the result byte equal the sign bit of the selected
            // byte.
            _ => (byte >> 7) * 255,
        };
        result | byte << (8 * k)
    })
}

fn logic3(a: u64, b: u64, c: u64, table: u64) -> u64 {
    (0..8)
        .filter(|row| table >> row & 1 != 0)
        .fold(0, |result, row| {
            let of = |bit: u32, x: u64| if row >> bit & 1 != 0 { x } else { !x };
            result | of(2, a) & of(1, b) & of(0, c)
        })
}

fn dot_bytes(number: Type, a: u64, b: u64) -> i128 {
    let byte = |x: u64, k: u32| -> i128 {
        let byte = (x >> (8 * k)) as u8;
        if number.is_signed() {
            (byte as i8).into()
        } else {
            byte.into()
        }
    };
    (0..4).map(|k| byte(a, k) * byte(b, k)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(operation: Op, number: Type, operands: [u64; 4]) -> u64 {
        integer(operation, number, Flags::default(), operands).unwrap()
    }

    #[test]
    fn arithmetic_wraps_at_its_width() {
        assert_eq!(of(Op::Add, Type::U32, [0xffff_ffff, 2, 0, 0]), 1);
        assert_eq!(of(Op::Add, Type::S16, [0xffff, 2, 0, 0]), 1);
        assert_eq!(of(Op::MultiplyHigh, Type::U32, [1 << 31, 4, 0, 0]), 2);
        assert_eq!(
            of(Op::MultiplyHigh, Type::U64, [u64::MAX, u64::MAX, 0, 0]),
            u64::MAX - 1
        );
        assert_eq!(
            of(Op::MultiplyWide, Type::S32, [0xffff_ffff, 3, 0, 0]),
            3u64.wrapping_neg()
        );
        assert_eq!(of(Op::Absolute, Type::S32, [1 << 31, 0, 0, 0]), 1 << 31);
    }

    #[test]
    fn saturation_stops_at_the_bounds() {
        let flags = Flags {
            saturate: true,
            ..Flags::default()
        };
        let sum = integer(Op::Add, Type::S32, flags, [0x7fff_ffff, 1, 0, 0]);
        assert_eq!(sum, Some(0x7fff_ffff));
        assert_eq!(integer(Op::Multiply, Type::S32, flags, [1; 4]), None);
    }

    #[test]
    fn relu_makes_negative_results_zero() {
        let flags = Flags {
            relu: true,
            ..Flags::default()
        };
        let minus_one = 0xffff_ffff;
        assert_eq!(
            integer(Op::Min, Type::S32, flags, [minus_one, 5, 0, 0]),
            Some(0)
        );
        assert_eq!(
            integer(Op::Max, Type::S32, flags, [minus_one, 5, 0, 0]),
            Some(5)
        );
        assert_eq!(integer(Op::Min, Type::U32, flags, [1; 4]), None);
    }

    #[test]
    fn shifts_beyond_the_width_leave_only_the_sign() {
        assert_eq!(of(Op::ShiftLeft, Type::B32, [1, 32, 0, 0]), 0);
        assert_eq!(of(Op::ShiftLeft, Type::B64, [1, 63, 0, 0]), 1 << 63);
        assert_eq!(of(Op::ShiftRight, Type::U32, [u64::MAX, 40, 0, 0]), 0);
        assert_eq!(
            of(Op::ShiftRight, Type::S32, [1 << 31, 40, 0, 0]),
            0xffff_ffff
        );
    }

    #[test]
    fn bit_fields_are_extracted_and_inserted() {
        assert_eq!(of(Op::ExtractBits, Type::U32, [0xabcd, 4, 8, 0]), 0xbc);
        assert_eq!(of(Op::ExtractBits, Type::S32, [0xf0, 4, 4, 0]), 0xffff_ffff);
        assert_eq!(
            of(Op::ExtractBits, Type::S32, [1 << 31, 30, 8, 0]),
            0xffff_fffe
        );
        assert_eq!(of(Op::InsertBits, Type::B32, [0xf, 0, 8, 4]), 0xf00);
        assert_eq!(
            of(
                Op::PermuteBytes,
                Type::B32,
                [0x3322_1100, 0x7766_5544, 0x7410, 0]
            ),
            0x7744_1100
        );
        assert_eq!(
            of(Op::PermuteBytes, Type::B32, [0x80, 0, 0x8888, 0]),
            0xffff_ffff
        );
        assert_eq!(of(Op::Logic3, Type::B32, [12, 10, 9, 0x96]), 12 ^ 10 ^ 9);
        assert_eq!(of(Op::HighestBit, Type::U32, [8, 0, 0, 0]), 3);
        assert_eq!(
            of(Op::HighestBit, Type::S32, [u64::MAX, 0, 0, 0]),
            0xffff_ffff
        );
    }

    #[test]
    fn quotients_by_zero_have_all_bits_set() {
        assert_eq!(of(Op::Divide, Type::U32, [7, 0, 0, 0]), 0xffff_ffff);
        assert_eq!(
            of(Op::Divide, Type::S32, [7u64.wrapping_neg(), 2, 0, 0]),
            0xffff_fffd
        );
        assert_eq!(
            of(Op::Remainder, Type::S32, [7u64.wrapping_neg(), 2, 0, 0]),
            0xffff_ffff
        );
    }
}
