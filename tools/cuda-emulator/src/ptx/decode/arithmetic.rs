//! Decodes arithmetic instructions, which compute with the values of a single lane.

use super::fast::{fast, fast_comparison};
use super::{Decoder, Result};
use crate::numbers::{
    Arithmetic, ArithmeticOperation as Op, Comparison, Conversion, Flags, Rounding,
};
use crate::ptx::instruction::{Compare, DoubleOperation, Logic, Operation, WordOperation};
use crate::ptx::operand::Operand;
use crate::ptx::types::{Class, Register, Type};

/// The type of a source operand. `Same` is the type of the instruction, and `Word` is a 32-bit word. `Wide` is the type
/// of the result, which is twice as wide as the type of the instruction.
#[derive(Clone, Copy)]
enum Of {
    Same,
    Word,
    Wide,
}

fn named(name: &str) -> Option<(Op, &'static [Of])> {
    use Of::{Same, Word};
    Some(match name {
        "add" => (Op::Add, &[Same, Same]),
        "sub" => (Op::Subtract, &[Same, Same]),
        "mul" => (Op::Multiply, &[Same, Same]),
        "mad" | "fma" => (Op::MultiplyAdd, &[Same, Same, Same]),
        "div" => (Op::Divide, &[Same, Same]),
        "rem" => (Op::Remainder, &[Same, Same]),
        "min" => (Op::Min, &[Same, Same]),
        "max" => (Op::Max, &[Same, Same]),
        "abs" => (Op::Absolute, &[Same]),
        "neg" => (Op::Negate, &[Same]),
        "and" => (Op::And, &[Same, Same]),
        "or" => (Op::Or, &[Same, Same]),
        "xor" => (Op::Xor, &[Same, Same]),
        "not" => (Op::Not, &[Same]),
        "cnot" => (Op::IsZero, &[Same]),
        "shl" => (Op::ShiftLeft, &[Same, Word]),
        "shr" => (Op::ShiftRight, &[Same, Word]),
        "popc" => (Op::CountOnes, &[Same]),
        "clz" => (Op::LeadingZeros, &[Same]),
        "brev" => (Op::ReverseBits, &[Same]),
        "bfind" => (Op::HighestBit, &[Same]),
        "bfe" => (Op::ExtractBits, &[Same, Word, Word]),
        "bfi" => (Op::InsertBits, &[Same, Same, Word, Word]),
        "prmt" => (Op::PermuteBytes, &[Same, Same, Word]),
        "lop3" => (Op::Logic3, &[Same, Same, Same, Word]),
        "shf" => (Op::FunnelRight, &[Same, Same, Word]),
        "ex2" => (Op::Exponential2, &[Same]),
        "lg2" => (Op::Logarithm2, &[Same]),
        "rcp" => (Op::Reciprocal, &[Same]),
        "sqrt" => (Op::SquareRoot, &[Same]),
        "rsqrt" => (Op::ReciprocalSquareRoot, &[Same]),
        "sin" => (Op::Sine, &[Same]),
        "cos" => (Op::Cosine, &[Same]),
        "tanh" => (Op::HyperbolicTangent, &[Same]),
        "copysign" => (Op::CopySign, &[Same, Same]),
        "sad" => (Op::AbsoluteDifferenceAdd, &[Same, Same, Same]),
        _ => return None,
    })
}

fn rounding(modifier: &str) -> Option<Rounding> {
    Some(match modifier {
        "rn" => Rounding::Nearest,
        "rz" => Rounding::TowardZero,
        "rm" => Rounding::Down,
        "rp" => Rounding::Up,
        _ => return None,
    })
}

/// Returns the type of each half of the packed type `modifier`, or `None` if `modifier` is not a packed type.
fn halves(modifier: &str) -> Option<Type> {
    Some(match modifier {
        "f16x2" => Type::F16,
        "bf16x2" => Type::BF16,
        _ => return None,
    })
}

fn integer_rounding(modifier: &str) -> Option<Rounding> {
    Some(match modifier {
        "rni" => Rounding::Nearest,
        "rzi" => Rounding::TowardZero,
        "rmi" => Rounding::Down,
        "rpi" => Rounding::Up,
        _ => return None,
    })
}

impl Decoder<'_> {
    pub(super) fn arithmetic(&mut self) -> Result<Operation> {
        match self.name {
            "mov" => self.mov(),
            "setp" => self.setp(),
            "set" => self.set(),
            "selp" => self.selp(),
            "cvt" => self.cvt(),
            "testp" => self.testp(),
            "dp4a" => self.dp4a(),
            name => match named(name) {
                Some((operation, operands)) => self.numbers(operation, operands),
                None => Err(self.unsupported("the instruction")),
            },
        }
    }

    fn flags(&mut self) -> Flags {
        // The modifiers `.approx` and `.full` allow approximate results. They have no effect here, because the emulator
        // always computes accurate results.
        self.ignores(&["approx", "full"]);
        Flags {
            flush: self.takes("ftz"),
            saturate: self.takes("sat"),
            keep_nan: self.takes("NaN"),
            relu: self.takes("relu"),
            wrap: self.takes("wrap") || self.takes("shiftamt"),
            rounding: self.take_first(rounding).unwrap_or_default(),
        }
    }

    fn numbers(&mut self, operation: Op, operands: &[Of]) -> Result<Operation> {
        let flags = self.flags();
        self.ignores(&["lo"]);
        let operation = match operation {
            Op::Multiply if self.takes("wide") => Op::MultiplyWide,
            Op::MultiplyAdd if self.takes("wide") => Op::MultiplyAddWide,
            Op::Multiply if self.takes("hi") => Op::MultiplyHigh,
            Op::MultiplyAdd if self.takes("hi") => Op::MultiplyAddHigh,
            Op::FunnelRight if self.takes("l") => Op::FunnelLeft,
            Op::FunnelRight => {
                self.ignores(&["r", "clamp"]);
                operation
            }
            operation => operation,
        };
        let number = self.take_type()?;
        let wide = matches!(operation, Op::MultiplyWide | Op::MultiplyAddWide);
        let result = match operation {
            _ if wide && number.bits() == 32 => Class::Double,
            Op::CountOnes | Op::LeadingZeros | Op::HighestBit => Class::Word,
            _ => number.class(),
        };
        if operation == Op::FunnelLeft {
            self.ignores(&["clamp"]);
        }
        let to = self.target(0, result)?;
        let mut from = [to; 4];
        for (k, of) in operands.iter().enumerate() {
            let of = if wide && k == 2 { Of::Wide } else { *of };
            from[k] = match of {
                Of::Same => self.source(k + 1, number)?,
                Of::Word => self.source(k + 1, Type::U32)?,
                Of::Wide if number.bits() == 32 => self.source(k + 1, Type::U64)?,
                Of::Wide => self.source(k + 1, Type::U32)?,
            };
        }
        let arithmetic = Arithmetic {
            operation,
            number,
            flags,
        };
        if arithmetic.of([0; 4]).is_none() {
            return Err(self.unsupported(&format!("{number:?} with {flags:?}")));
        }
        Ok(fast(arithmetic, to, from).unwrap_or(Operation::Arithmetic {
            arithmetic,
            to,
            from,
        }))
    }

    fn testp(&mut self) -> Result<Operation> {
        let operation = self
            .take_first(|modifier| {
                Some(match modifier {
                    "finite" => Op::IsFinite,
                    "infinite" => Op::IsInfinite,
                    "number" => Op::IsNumber,
                    "notanumber" => Op::IsNotNumber,
                    "normal" => Op::IsNormal,
                    "subnormal" => Op::IsSubnormal,
                    _ => return None,
                })
            })
            .ok_or_else(|| self.unsupported("the tested kind"))?;
        let number = self.take_type()?;
        let arithmetic = Arithmetic::plain(operation, number);
        if arithmetic.of([0; 4]).is_none() {
            return Err(self.unsupported(&format!("{number:?}")));
        }
        let to = self.target(0, Class::Predicate)?;
        let from = self.source(1, number)?;
        Ok(Operation::Arithmetic {
            arithmetic,
            to,
            from: [from; 4],
        })
    }

    fn dp4a(&mut self) -> Result<Operation> {
        let number = self.take_type()?;
        if self.take_type()? != number {
            return Err(self.unsupported("bytes of different types"));
        }
        let to = self.target(0, Class::Word)?;
        let [a, b, c] = [1, 2, 3].map(|k| self.source(k, number));
        Ok(Operation::Arithmetic {
            arithmetic: Arithmetic::plain(Op::DotBytes, number),
            to,
            from: [a?, b?, c?, to],
        })
    }

    fn mov(&mut self) -> Result<Operation> {
        let number = self.take_type()?;
        match (self.operand(0)?, self.operand(1)?) {
            (Operand::List(to), from) => {
                let from = self.source_of(&from, number)?;
                let part = self.part(number, to.len())?;
                let to = to
                    .iter()
                    .map(|operand| self.target_of(operand, part.class()))
                    .collect::<Result<_>>()?;
                Ok(Operation::Unpack { to, from })
            }
            (to, Operand::List(from)) => {
                let to = self.target_of(&to, number.class())?;
                let part = self.part(number, from.len())?;
                let from = from
                    .iter()
                    .map(|operand| self.source_of(operand, part))
                    .collect::<Result<_>>()?;
                Ok(Operation::Pack { to, from })
            }
            (to, Operand::Clock) => Ok(Operation::Clock(self.target_of(&to, number.class())?)),
            (to, from) => {
                let to = self.target_of(&to, number.class())?;
                let from = self.source_of(&from, number)?;
                match (to, from) {
                    (Register::Word(to), Register::Word(from)) => Ok(Operation::Words {
                        operation: WordOperation::Move,
                        to,
                        from: [from; 3],
                    }),
                    (Register::Double(to), Register::Double(from)) => Ok(Operation::Doubles {
                        operation: DoubleOperation::Move,
                        to,
                        from: [from; 3],
                    }),
                    (Register::Predicate(to), Register::Predicate(from)) => {
                        Ok(Operation::Predicates {
                            logic: Logic::Move,
                            to,
                            from: [from; 2],
                        })
                    }
                    _ => Err(self.unsupported("registers of different kinds")),
                }
            }
        }
    }

    /// Returns the type of one part of a value that consists of `parts` packed parts. `number` is the type of the whole
    /// value.
    fn part(&self, number: Type, parts: usize) -> Result<Type> {
        match number.bits() as usize / parts.max(1) {
            8 => Ok(Type::B8),
            16 => Ok(Type::B16),
            32 => Ok(Type::B32),
            _ => Err(self.unsupported("this number of parts")),
        }
    }

    fn comparison(&mut self) -> Result<Comparison> {
        self.take_first(Comparison::of)
            .ok_or_else(|| self.unsupported("the comparison"))
    }

    fn setp(&mut self) -> Result<Operation> {
        let comparison = self.comparison()?;
        let logic = self.take_first(|modifier| {
            Some(match modifier {
                "and" => Logic::And,
                "or" => Logic::Or,
                "xor" => Logic::Xor,
                _ => return None,
            })
        });
        let number = self.compared()?;
        let (to, opposite) = match self.target_and_predicate(0, Class::Predicate)? {
            (Register::Predicate(to), opposite) => (to, opposite),
            _ => return Err(self.unsupported("a predicate")),
        };
        let from = [self.source(1, number)?, self.source(2, number)?];
        let combined = match logic {
            Some(logic) => Some((logic, self.condition(3)?)),
            None => None,
        };
        if let ([Register::Word(a), Register::Word(b)], None, None) = (from, opposite, combined)
            && let Some(comparison) = fast_comparison(comparison, number)
        {
            return Ok(Operation::CompareWords {
                comparison,
                to,
                from: [a, b],
            });
        }
        Ok(Operation::Compare(Box::new(Compare {
            comparison,
            number,
            from,
            to,
            opposite,
            combined,
        })))
    }

    /// Returns the type of a comparison's operands. The function does not consume the modifier `ftz`, so that the
    /// decoder refuses comparisons with this modifier. The reason is that the emulator's comparisons do not flush
    /// subnormals, and flushing could change the result of a comparison.
    fn compared(&mut self) -> Result<Type> {
        let number = self.take_type()?;
        match number {
            Type::F16x2 | Type::BF16x2 | Type::Predicate => {
                Err(self.unsupported(&format!("{number:?}")))
            }
            number => Ok(number),
        }
    }

    fn set(&mut self) -> Result<Operation> {
        let comparison = self.comparison()?;
        let result = self.take_type()?;
        let truth = match result {
            Type::U32 => Some(0xFFFF),
            // The bits of the number 1.
            Type::F16x2 => Some(0x3C00),
            Type::BF16x2 => Some(0x3F80),
            _ => None,
        };
        if let Some(truth) = truth
            && let Some(number) = self.take_first(halves)
        {
            let is_packed = matches!(result, Type::F16x2 | Type::BF16x2);
            if is_packed && (result == Type::F16x2) != (number == Type::F16) {
                return Err(self.unsupported("a result and operands of one type"));
            }
            return Ok(Operation::SetHalves {
                comparison,
                number,
                truth,
                to: self.word_target(0)?,
                from: [self.source(1, Type::B32)?, self.source(2, Type::B32)?],
            });
        }
        let number = self.compared()?;
        let truth = match result {
            Type::F32 => 1f32.to_bits(),
            Type::U32 | Type::S32 => u32::MAX,
            _ => return Err(self.unsupported(&format!("a result of {result:?}"))),
        };
        let to = self.word_target(0)?;
        let from = [self.source(1, number)?, self.source(2, number)?];
        let compare = Box::new(Compare {
            comparison,
            number,
            from,
            to: 0,
            opposite: None,
            combined: None,
        });
        Ok(Operation::SetWord { compare, truth, to })
    }

    fn selp(&mut self) -> Result<Operation> {
        let number = self.take_type()?;
        let to = self.target(0, number.class())?;
        let from = [self.source(1, number)?, self.source(2, number)?];
        let condition = self.condition(3)?;
        Ok(match (to, from) {
            (Register::Word(to), [Register::Word(a), Register::Word(b)]) => {
                Operation::SelectWords {
                    to,
                    from: [a, b],
                    condition,
                }
            }
            _ => Operation::Select {
                to,
                from,
                condition,
            },
        })
    }

    /// Decodes `cvt.rna.tf32.f32`, which rounds an f32 to tf32.
    fn reduce_precision(&mut self) -> Result<Operation> {
        if !self.takes("tf32") || self.take_type()? != Type::F32 {
            return Err(self.unsupported("the types"));
        }
        let to = self.target(0, Class::Word)?;
        let from = self.source(1, Type::F32)?;
        Ok(Operation::Arithmetic {
            arithmetic: Arithmetic::plain(Op::Reduce, Type::F32),
            to,
            from: [from; 4],
        })
    }

    fn cvt(&mut self) -> Result<Operation> {
        if self.takes("rna") {
            return self.reduce_precision();
        }
        let relu = self.takes("relu");
        let to_integer = self.take_first(integer_rounding);
        let rounding = self.take_first(rounding);
        let (flush, saturate) = (self.takes("ftz"), self.takes("sat"));
        let (to, from) = (self.take_type()?, self.take_type()?);
        if matches!(to, Type::F16x2 | Type::BF16x2) {
            let plain = !relu && !flush && !saturate && to_integer.is_none();
            if from != Type::F32 || !plain || rounding != Some(Rounding::Nearest) {
                return Err(self.unsupported("this conversion of a pair"));
            }
            let target = self.word_target(0)?;
            let (high, low) = (self.word(1)?, self.word(2)?);
            let operation = match to {
                Type::F16x2 => WordOperation::PairHalf,
                _ => WordOperation::PairBrain,
            };
            return Ok(Operation::Words {
                operation,
                to: target,
                from: [high, low, low],
            });
        }
        let of_pairs = matches!(from, Type::F16x2 | Type::BF16x2);
        if relu || of_pairs || [to, from].contains(&Type::Predicate) {
            return Err(self.unsupported(&format!("{from:?} to {to:?}")));
        }
        let conversion = Conversion {
            to,
            from,
            rounding: rounding.unwrap_or_default(),
            to_integer,
            flush,
            saturate,
        };
        let target = self.any_target(0)?;
        let source = self.any_source(1, from)?;
        Ok(match (from, to, target, source) {
            (Type::U32, Type::U64 | Type::S64, Register::Double(to), Register::Word(from)) => {
                Operation::Doubles {
                    operation: DoubleOperation::Widen,
                    to,
                    from: [from; 3],
                }
            }
            (Type::S32, Type::S64, Register::Double(to), Register::Word(from)) if !saturate => {
                Operation::Doubles {
                    operation: DoubleOperation::WidenSigned,
                    to,
                    from: [from; 3],
                }
            }
            (
                Type::U64 | Type::S64,
                Type::U32 | Type::S32,
                Register::Word(to),
                Register::Double(from),
            ) if !saturate => Operation::Narrow { to, from },
            (Type::U32 | Type::S32, Type::F32, Register::Word(to), Register::Word(source))
                if rounding == Some(Rounding::Nearest) && !saturate =>
            {
                Operation::Words {
                    operation: match from {
                        Type::U32 => WordOperation::ToFloat,
                        _ => WordOperation::ToFloatSigned,
                    },
                    to,
                    from: [source; 3],
                }
            }
            _ => Operation::Convert {
                conversion,
                to: target,
                from: source,
            },
        })
    }
}
