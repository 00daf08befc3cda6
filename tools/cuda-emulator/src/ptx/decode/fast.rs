//! Selects the operations for which the emulator has a special loop over all lanes. Such a loop is faster than
//! computing one lane at a time.

use crate::numbers::{Arithmetic, ArithmeticOperation as Op, Comparison, Flags};
use crate::ptx::instruction::{DoubleOperation, Logic, Operation, WordComparison, WordOperation};
use crate::ptx::types::{Register, Type};

/// Converts an arithmetic operation to an operation that runs in a special loop over all lanes. Returns `None` if there
/// is no such loop for the operation.
pub fn fast(arithmetic: Arithmetic, to: Register, from: [Register; 4]) -> Option<Operation> {
    let Arithmetic {
        operation,
        number,
        flags,
    } = arithmetic;
    if operation == Op::Exponential2 && number == Type::F32 {
        let flushes = flags
            == Flags {
                flush: true,
                ..Flags::default()
            };
        return flushes
            .then(|| words(WordOperation::Exponential, to, from))
            .flatten();
    }
    if flags != Flags::default() {
        return None;
    }
    let is_float = number == Type::F32;
    let is_word = matches!(number, Type::U32 | Type::S32 | Type::B32);
    let is_double = matches!(number, Type::U64 | Type::S64 | Type::B64);
    let signed = number.is_signed();
    use DoubleOperation as D;
    use WordOperation as W;
    match (operation, is_float, is_word) {
        (Op::Add, _, true) => words(W::Add, to, from),
        (Op::Subtract, _, true) => words(W::Subtract, to, from),
        (Op::Multiply, _, true) => words(W::Multiply, to, from),
        (Op::MultiplyAdd, _, true) => words(W::MultiplyAdd, to, from),
        (Op::MultiplyHigh, _, true) if !signed => words(W::MultiplyHigh, to, from),
        (Op::And, _, true) => words(W::And, to, from),
        (Op::Or, _, true) => words(W::Or, to, from),
        (Op::Xor, _, true) => words(W::Xor, to, from),
        (Op::Not, _, true) => words(W::Not, to, from),
        (Op::ShiftLeft, _, true) => words(W::ShiftLeft, to, from),
        (Op::ShiftRight, _, true) if signed => words(W::ShiftRightSigned, to, from),
        (Op::ShiftRight, _, true) => words(W::ShiftRight, to, from),
        (Op::Min, _, true) if signed => words(W::MinSigned, to, from),
        (Op::Min, _, true) => words(W::Min, to, from),
        (Op::Max, _, true) if signed => words(W::MaxSigned, to, from),
        (Op::Max, _, true) => words(W::Max, to, from),
        (Op::MultiplyWide, _, true) if signed => wide(D::MultiplyWideSigned, to, from),
        (Op::MultiplyWide, _, true) => wide(D::MultiplyWide, to, from),
        (Op::MultiplyAddWide, _, true) if signed => wide(D::MultiplyAddWideSigned, to, from),
        (Op::MultiplyAddWide, _, true) => wide(D::MultiplyAddWide, to, from),
        (Op::Add, true, _) => words(W::AddFloat, to, from),
        (Op::Subtract, true, _) => words(W::SubtractFloat, to, from),
        (Op::Multiply, true, _) => words(W::MultiplyFloat, to, from),
        (Op::MultiplyAdd, true, _) => words(W::MultiplyAddFloat, to, from),
        (Op::Min, true, _) => words(W::MinFloat, to, from),
        (Op::Max, true, _) => words(W::MaxFloat, to, from),
        (Op::Negate, true, _) => words(W::NegateFloat, to, from),
        (Op::Absolute, true, _) => words(W::AbsoluteFloat, to, from),
        (Op::Add, ..) if is_double => wide(D::Add, to, from),
        (Op::Subtract, ..) if is_double => wide(D::Subtract, to, from),
        (Op::Multiply, ..) if is_double => wide(D::Multiply, to, from),
        (Op::MultiplyAdd, ..) if is_double => wide(D::MultiplyAdd, to, from),
        (Op::And, ..) if is_double => wide(D::And, to, from),
        (Op::Or, ..) if is_double => wide(D::Or, to, from),
        (Op::ShiftLeft, ..) if is_double => wide(D::ShiftLeft, to, from),
        (Op::ShiftRight, ..) if is_double && !signed => wide(D::ShiftRight, to, from),
        (Op::And | Op::Or | Op::Xor | Op::Not, ..) if number == Type::Predicate => {
            predicates(operation, to, from)
        }
        _ => None,
    }
}

/// Returns the register rows of three operands. An operation may have fewer operands. The row of a missing operand is
/// arbitrary, because the operation's loop ignores the values in that row.
fn rows(from: [Register; 4]) -> [u32; 3] {
    [0, 1, 2].map(|k| match from[k] {
        Register::Predicate(row) | Register::Word(row) | Register::Double(row) => row,
    })
}

fn words(operation: WordOperation, to: Register, from: [Register; 4]) -> Option<Operation> {
    let Register::Word(to) = to else {
        return None;
    };
    Some(Operation::Words {
        operation,
        to,
        from: rows(from),
    })
}

fn wide(operation: DoubleOperation, to: Register, from: [Register; 4]) -> Option<Operation> {
    let Register::Double(to) = to else {
        return None;
    };
    Some(Operation::Doubles {
        operation,
        to,
        from: rows(from),
    })
}

fn predicates(operation: Op, to: Register, from: [Register; 4]) -> Option<Operation> {
    let Register::Predicate(to) = to else {
        return None;
    };
    let logic = match operation {
        Op::And => Logic::And,
        Op::Or => Logic::Or,
        Op::Xor => Logic::Xor,
        _ => Logic::Not,
    };
    let [a, b, _] = rows(from);
    Some(Operation::Predicates {
        logic,
        to,
        from: [a, b],
    })
}

/// Returns the comparison with a special loop over all lanes, or `None` if the emulator has no such loop.
pub fn fast_comparison(comparison: Comparison, number: Type) -> Option<WordComparison> {
    use Comparison as C;
    use WordComparison as W;
    Some(match (comparison, number) {
        (C::Equal, Type::U32 | Type::S32 | Type::B32) => W::Equal,
        (C::NotEqual, Type::U32 | Type::S32 | Type::B32) => W::NotEqual,
        (C::Less, Type::U32 | Type::B32) => W::Less,
        (C::LessOrEqual, Type::U32 | Type::B32) => W::LessOrEqual,
        (C::Greater, Type::U32 | Type::B32) => W::Greater,
        (C::GreaterOrEqual, Type::U32 | Type::B32) => W::GreaterOrEqual,
        (C::Less, Type::S32) => W::LessSigned,
        (C::LessOrEqual, Type::S32) => W::LessOrEqualSigned,
        (C::Greater, Type::S32) => W::GreaterSigned,
        (C::GreaterOrEqual, Type::S32) => W::GreaterOrEqualSigned,
        (C::Equal, Type::F32) => W::EqualFloat,
        (C::NotEqualOrNan, Type::F32) => W::NotEqualFloat,
        (C::Less, Type::F32) => W::LessFloat,
        (C::LessOrEqual, Type::F32) => W::LessOrEqualFloat,
        (C::Greater, Type::F32) => W::GreaterFloat,
        (C::GreaterOrEqual, Type::F32) => W::GreaterOrEqualFloat,
        _ => return None,
    })
}
