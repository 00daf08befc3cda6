//! Comparisons of two values of any PTX type.

use std::cmp::Ordering;

use super::{extend, half_to_single};
use crate::ptx::Type;

/// The comparison operators. The last eight variants compare floats. A variant with `OrNan` is also true if an operand
/// is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    EqualOrNan,
    NotEqualOrNan,
    LessOrNan,
    LessOrEqualOrNan,
    GreaterOrNan,
    GreaterOrEqualOrNan,
    BothNumbers,
    AnyNan,
}

impl Comparison {
    /// Parses the name of a comparison in PTX. The names `lo`, `ls`, `hi` and `hs`, for unsigned types only, become the same
    /// variants as `lt`, `le`, `gt` and `ge`.
    pub fn of(text: &str) -> Option<Self> {
        Some(match text {
            "eq" => Self::Equal,
            "ne" => Self::NotEqual,
            "lt" | "lo" => Self::Less,
            "le" | "ls" => Self::LessOrEqual,
            "gt" | "hi" => Self::Greater,
            "ge" | "hs" => Self::GreaterOrEqual,
            "equ" => Self::EqualOrNan,
            "neu" => Self::NotEqualOrNan,
            "ltu" => Self::LessOrNan,
            "leu" => Self::LessOrEqualOrNan,
            "gtu" => Self::GreaterOrNan,
            "geu" => Self::GreaterOrEqualOrNan,
            "num" => Self::BothNumbers,
            "nan" => Self::AnyNan,
            _ => return None,
        })
    }

    /// Returns true if the comparison is true for two operands. `order` is the first operand's order relative to the
    /// second, or `None` if an operand is NaN.
    fn holds(self, order: Option<Ordering>) -> bool {
        let Some(order) = order else {
            return matches!(
                self,
                Self::EqualOrNan
                    | Self::NotEqualOrNan
                    | Self::LessOrNan
                    | Self::LessOrEqualOrNan
                    | Self::GreaterOrNan
                    | Self::GreaterOrEqualOrNan
                    | Self::AnyNan
            );
        };
        match self {
            Self::Equal | Self::EqualOrNan => order.is_eq(),
            Self::NotEqual | Self::NotEqualOrNan => order.is_ne(),
            Self::Less | Self::LessOrNan => order.is_lt(),
            Self::LessOrEqual | Self::LessOrEqualOrNan => order.is_le(),
            Self::Greater | Self::GreaterOrNan => order.is_gt(),
            Self::GreaterOrEqual | Self::GreaterOrEqualOrNan => order.is_ge(),
            Self::BothNumbers => true,
            Self::AnyNan => false,
        }
    }
}

/// Compares two values of type `number`, given as bits.
pub fn compare(comparison: Comparison, number: Type, a: u64, b: u64) -> bool {
    let order = match number {
        Type::F32 => f32::from_bits(a as u32).partial_cmp(&f32::from_bits(b as u32)),
        Type::F64 => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
        Type::F16 | Type::BF16 => {
            half_to_single(number, a as u16).partial_cmp(&half_to_single(number, b as u16))
        }
        _ => Some(extend(number, a).cmp(&extend(number, b))),
    };
    comparison.holds(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_does_not_equal_itself() {
        let nan = u64::from(f32::NAN.to_bits());
        assert!(!compare(Comparison::Equal, Type::F32, nan, nan));
        assert!(!compare(Comparison::NotEqual, Type::F32, nan, nan));
        assert!(compare(Comparison::NotEqualOrNan, Type::F32, nan, 0));
        assert!(compare(Comparison::AnyNan, Type::F32, 0, nan));
        assert!(compare(Comparison::Equal, Type::F32, 0, 1 << 31));
    }

    #[test]
    fn signed_types_compare_with_sign() {
        assert!(compare(Comparison::Less, Type::S32, 0xffff_ffff, 0));
        assert!(compare(Comparison::Greater, Type::U32, 0xffff_ffff, 0));
        assert!(compare(Comparison::Equal, Type::B16, 0x1_0000, 0));
        assert!(compare(Comparison::Less, Type::BF16, 0xbf80, 0));
    }
}
