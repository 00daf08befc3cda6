//! What instructions compute, of one lane's numbers, as bits.

mod compare;
mod convert;
mod float;
mod half;
mod integer;

pub use compare::{Comparison, compare};
pub use convert::{Conversion, convert};
pub use float::{exponential, max, min, single_bits};
pub use half::{half_to_single, to_brain, to_half};

use crate::ptx::Type;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArithmeticOperation {
    Add,
    Subtract,
    Multiply,
    MultiplyHigh,
    /// Of a result twice as wide.
    MultiplyWide,
    MultiplyAdd,
    MultiplyAddHigh,
    MultiplyAddWide,
    Divide,
    Remainder,
    Min,
    Max,
    Absolute,
    Negate,
    And,
    Or,
    Xor,
    Not,
    /// 1 where nothing is set.
    IsZero,
    ShiftLeft,
    ShiftRight,
    /// Of two words side by side.
    FunnelLeft,
    FunnelRight,
    CountOnes,
    LeadingZeros,
    ReverseBits,
    HighestBit,
    ExtractBits,
    InsertBits,
    PermuteBytes,
    /// Any function of three bits.
    Logic3,
    Exponential2,
    Logarithm2,
    Reciprocal,
    SquareRoot,
    ReciprocalSquareRoot,
    Sine,
    Cosine,
    HyperbolicTangent,
    CopySign,
    /// |a − b| + c.
    AbsoluteDifferenceAdd,
    /// Four products of bytes, added up.
    DotBytes,
    /// To 10 bits behind the point, ties away from 0 (tf32).
    Reduce,
    /// The kinds of floats that `testp` asks for.
    IsFinite,
    IsInfinite,
    IsNumber,
    IsNotNumber,
    IsNormal,
    IsSubnormal,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    #[default]
    Nearest,
    TowardZero,
    Down,
    Up,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Subnormals are 0, before and after.
    pub flush: bool,
    pub saturate: bool,
    /// Min and max of what is no number are no number.
    pub keep_nan: bool,
    /// Negative results are 0.
    pub relu: bool,
    /// Shifts are of the low bits of their amount; or the highest bit is counted from the top.
    pub wrap: bool,
    pub rounding: Rounding,
}

impl Flags {
    /// A float's result as it is asked for.
    fn limited(self, x: f64) -> f64 {
        let x = if self.relu && x < 0.0 { 0.0 } else { x };
        if self.saturate { saturated(x) } else { x }
    }
}

/// Within 0 and 1; what is no number is 0.
fn saturated(x: f64) -> f64 {
    if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) }
}

/// An operation, of which type, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    pub operation: ArithmeticOperation,
    pub number: Type,
    pub flags: Flags,
}

impl Arithmetic {
    /// Of the type, without anything special.
    pub fn plain(operation: ArithmeticOperation, number: Type) -> Self {
        Self {
            operation,
            number,
            flags: Flags::default(),
        }
    }

    /// The result, or `None` where the operation is not of this type or not done in this way, whatever the operands.
    pub fn of(self, operands: [u64; 4]) -> Option<u64> {
        match self.number {
            Type::Predicate => integer::predicate(self.operation, operands),
            Type::F32 => float::single(self.operation, self.flags, operands),
            Type::F64 => float::double(self.operation, self.flags, operands),
            number if number.is_half() => half::half(self.operation, number, self.flags, operands),
            number => integer::integer(self.operation, number, self.flags, operands),
        }
    }
}

/// The number in the low bits, with its sign if the type has one.
pub fn extend(number: Type, bits: u64) -> i128 {
    let unused = 64 - number.bits();
    if number.is_signed() {
        ((bits << unused) as i64 >> unused).into()
    } else {
        (bits << unused >> unused).into()
    }
}

/// The low bits of a number.
pub fn truncate(number: Type, bits: u64) -> u64 {
    let unused = 64 - number.bits();
    bits << unused >> unused
}
