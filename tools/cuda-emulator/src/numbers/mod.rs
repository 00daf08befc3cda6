//! The arithmetic instructions, computed for a single lane. Operands and results are given as bits.

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
    /// Multiplies to a result that is twice as wide as the operands.
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
    /// Returns 1 if no bit of the operand is set, otherwise 0.
    IsZero,
    ShiftLeft,
    ShiftRight,
    /// Concatenates two words to a 64-bit value, and shifts this value (`shf`).
    FunnelLeft,
    FunnelRight,
    CountOnes,
    LeadingZeros,
    ReverseBits,
    HighestBit,
    ExtractBits,
    InsertBits,
    PermuteBytes,
    /// Applies a bitwise function of three operands (`lop3`). A table of eight bits gives the function's result for
    /// each combination of three bits.
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
    /// Computes |a − b| + c.
    AbsoluteDifferenceAdd,
    /// Computes the dot product of four bytes with four bytes (`dp4a`).
    DotBytes,
    /// Rounds an f32 to a mantissa of 10 bits, ties away from 0 (tf32).
    Reduce,
    /// Tests whether a float is finite. This operation and the following ones test the class of a float (`testp`).
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
    /// True if subnormal operands and results are flushed to 0.
    pub flush: bool,
    pub saturate: bool,
    /// True if the operations min and max return NaN when an operand is NaN.
    pub keep_nan: bool,
    /// True if a negative result is replaced by 0.
    pub relu: bool,
    /// The meaning depends on the operation. For a shift, true means that the shift uses only the low bits of the shift
    /// amount. For the search of the highest set bit, true means that the result is the distance of that bit from the
    /// operand's top bit.
    pub wrap: bool,
    pub rounding: Rounding,
}

impl Flags {
    /// Applies the flags `relu` and `saturate` to the result of a float operation.
    fn limited(self, x: f64) -> f64 {
        let x = if self.relu && x < 0.0 { 0.0 } else { x };
        if self.saturate { saturated(x) } else { x }
    }
}

/// Clamps `x` to the range from 0 to 1. NaN becomes 0.
fn saturated(x: f64) -> f64 {
    if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) }
}

/// An operation with its type and flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    pub operation: ArithmeticOperation,
    pub number: Type,
    pub flags: Flags,
}

impl Arithmetic {
    /// Returns the operation with no flag set.
    pub fn plain(operation: ArithmeticOperation, number: Type) -> Self {
        Self {
            operation,
            number,
            flags: Flags::default(),
        }
    }

    /// Computes the operation. Returns `None` if the operation does not support the type or the flags, whatever the
    /// operands are.
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

/// Returns the value in the low bits, sign-extended if the type is signed.
pub fn extend(number: Type, bits: u64) -> i128 {
    let unused = 64 - number.bits();
    if number.is_signed() {
        ((bits << unused) as i64 >> unused).into()
    } else {
        (bits << unused >> unused).into()
    }
}

/// Returns the low bits of a value. The type `number` determines how many bits.
pub fn truncate(number: Type, bits: u64) -> u64 {
    let unused = 64 - number.bits();
    bits << unused >> unused
}
