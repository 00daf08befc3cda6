//! Decodes the text of an instruction to an operation. The decoder refuses the module if a modifier or an operand is
//! left over, because the emulator would not apply this modifier or operand.

mod arithmetic;
mod asynchronous;
mod fast;
mod matrix;
mod memory;
mod warp;
mod wmma;

use super::instruction::{Address, Guard, Operation};
use super::operand::{self, Operand};
use super::registers::Registers;
use super::types::{Class, Register, Space, Type};
use crate::fault::Fault;
use crate::numbers::ArithmeticOperation as Op;

type Result<T> = std::result::Result<T, Fault>;

/// Decodes one instruction.
///
/// # Errors
/// Returns an error that names the part of the instruction that the emulator does not support.
pub fn decode(
    opcode: &str,
    operands: Vec<Operand>,
    registers: &mut Registers,
) -> Result<Operation> {
    let mut words = opcode.split('.');
    let name = words.next().unwrap_or_default();
    let mut decoder = Decoder {
        name,
        modifiers: words.collect(),
        used: vec![false; operands.len()],
        operands,
        registers,
    };
    let operation = decoder.operation()?;
    decoder.finish()?;
    Ok(operation)
}

/// Returns the reduction that a modifier names, or `None` for any other modifier.
fn reduction(modifier: &str) -> Option<Op> {
    Some(match modifier {
        "add" => Op::Add,
        "min" => Op::Min,
        "max" => Op::Max,
        "and" => Op::And,
        "or" => Op::Or,
        "xor" => Op::Xor,
        _ => return None,
    })
}

/// The decoder of one instruction, which consumes the instruction's modifiers and operands one by one.
struct Decoder<'a> {
    name: &'a str,
    modifiers: Vec<&'a str>,
    operands: Vec<Operand>,
    used: Vec<bool>,
    registers: &'a mut Registers,
}

impl<'a> Decoder<'a> {
    fn operation(&mut self) -> Result<Operation> {
        match self.name {
            "exit" | "ret" => {
                self.takes("uni");
                Ok(Operation::Exit)
            }
            "trap" => Ok(Operation::Trap),
            "nanosleep" => {
                self.takes("u32");
                self.source(0, Type::U32)?;
                Ok(Operation::Sleep)
            }
            "ld" | "ldu" | "st" | "atom" | "red" | "cvta" | "isspacep" | "prefetch"
            | "prefetchu" | "discard" | "membar" | "fence" => self.memory(),
            "bar" | "barrier" | "shfl" | "vote" | "match" | "redux" | "activemask" | "elect"
            | "setmaxnreg" | "griddepcontrol" => self.warp(),
            "ldmatrix" | "stmatrix" | "mma" | "wgmma" => self.matrix(),
            "wmma" => self.wmma(),
            "cp" | "mbarrier" => self.asynchronous(),
            _ => self.arithmetic(),
        }
    }

    /// Consumes a modifier if it is present. Returns true if the modifier was present.
    fn takes(&mut self, modifier: &str) -> bool {
        let found = self.modifiers.iter().position(|have| *have == modifier);
        found.map(|at| self.modifiers.remove(at)).is_some()
    }

    /// Consumes each of the given modifiers that is present. The caller passes only modifiers without an effect in the
    /// emulator.
    fn ignores(&mut self, modifiers: &[&str]) {
        self.modifiers.retain(|have| !modifiers.contains(have));
    }

    /// Consumes the first modifier for which `meaning` returns a value, and returns the value.
    fn take_first<T>(&mut self, meaning: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (at, value) = self
            .modifiers
            .iter()
            .enumerate()
            .find_map(|(at, modifier)| Some((at, meaning(modifier)?)))?;
        self.modifiers.remove(at);
        Some(value)
    }

    /// Consumes the first remaining modifier that is a type.
    fn take_type(&mut self) -> Result<Type> {
        self.take_first(Type::of)
            .ok_or_else(|| self.unsupported("its type"))
    }

    /// Consumes the modifier of the memory space, if present. The default is the generic space.
    fn take_space(&mut self) -> Space {
        self.take_first(|modifier| {
            Some(match modifier {
                "global" | "const" => Space::Global,
                "shared" | "shared::cta" => Space::Shared,
                "local" => Space::Local,
                "param" | "param::entry" => Space::Parameter,
                _ => return None,
            })
        })
        .unwrap_or(Space::Generic)
    }

    /// Consumes all modifiers and operands, and returns an operation without an effect.
    fn nothing(&mut self) -> Operation {
        self.modifiers.clear();
        self.used.fill(true);
        Operation::Nothing
    }

    fn unsupported(&self, what: &str) -> Fault {
        Fault::Unsupported(format!("`{}`: {what}", self.name))
    }

    fn operand(&mut self, at: usize) -> Result<Operand> {
        let operand = self
            .operands
            .get(at)
            .cloned()
            .ok_or_else(|| self.unsupported("too few operands"))?;
        self.used[at] = true;
        Ok(operand)
    }

    /// Returns the register row of a source operand of type `number`.
    fn source(&mut self, at: usize, number: Type) -> Result<Register> {
        let operand = self.operand(at)?;
        self.source_of(&operand, number)
    }

    fn source_of(&mut self, operand: &Operand, number: Type) -> Result<Register> {
        let class = number.class();
        match operand {
            Operand::Register(register) if register.class() == class => Ok(*register),
            Operand::Number(text) => {
                let value = operand::number(text, number)
                    .ok_or_else(|| self.unsupported(&format!("the number `{text}`")))?;
                Ok(self.registers.constant(class, value))
            }
            Operand::Symbol(address) => Ok(self.registers.constant(class, *address)),
            Operand::Special(special) => Ok(self.registers.special(class, *special)),
            operand => Err(self.unsupported(&format!("{operand:?} as {number:?}"))),
        }
    }

    /// Returns the register row of a source operand like [`source`](Self::source), but also accepts a register that is
    /// wider than the type `number`.
    fn any_source(&mut self, at: usize, number: Type) -> Result<Register> {
        match self.operand(at)? {
            Operand::Register(register) => Ok(register),
            _ => self.source(at, number),
        }
    }

    /// Returns the register for a result, which must be of the given class. An ignored result (`_`) gets a new
    /// register.
    fn target(&mut self, at: usize, class: Class) -> Result<Register> {
        let operand = self.operand(at)?;
        self.target_of(&operand, class)
    }

    fn target_of(&mut self, operand: &Operand, class: Class) -> Result<Register> {
        match operand {
            Operand::Register(register) if register.class() == class => Ok(*register),
            Operand::Nothing => Ok(self.registers.add(class)),
            operand => Err(self.unsupported(&format!("a result in {operand:?}"))),
        }
    }

    /// Returns the register for a result like [`target`](Self::target), but accepts a register of any class.
    fn any_target(&mut self, at: usize) -> Result<Register> {
        match self.operand(at)? {
            Operand::Register(register) => Ok(register),
            operand => Err(self.unsupported(&format!("a result in {operand:?}"))),
        }
    }

    /// Returns the register row of an operand that is a 32-bit word.
    fn word(&mut self, at: usize) -> Result<u32> {
        let operand = self.operand(at)?;
        self.word_of(&operand)
    }

    fn word_of(&mut self, operand: &Operand) -> Result<u32> {
        match self.source_of(operand, Type::B32)? {
            Register::Word(row) => Ok(row),
            _ => Err(self.unsupported("a word")),
        }
    }

    fn word_target(&mut self, at: usize) -> Result<u32> {
        match self.target(at, Class::Word)? {
            Register::Word(row) => Ok(row),
            _ => Err(self.unsupported("a word")),
        }
    }

    fn predicate_target(&mut self, at: usize) -> Result<u32> {
        match self.target(at, Class::Predicate)? {
            Register::Predicate(row) => Ok(row),
            _ => Err(self.unsupported("a predicate")),
        }
    }

    /// Decodes a result that is a register with a predicate, `d|p`, or a register alone, `d`.
    fn target_and_predicate(&mut self, at: usize, class: Class) -> Result<(Register, Option<u32>)> {
        match self.operand(at)? {
            Operand::Pair(first, second) => {
                let first = self.target_of(&first, class)?;
                match self.target_of(&second, Class::Predicate)? {
                    Register::Predicate(row) => Ok((first, Some(row))),
                    _ => Err(self.unsupported("a predicate")),
                }
            }
            operand => Ok((self.target_of(&operand, class)?, None)),
        }
    }

    /// Decodes an operand that is a condition: a predicate, a negated predicate, or a constant.
    fn condition(&mut self, at: usize) -> Result<Guard> {
        let operand = self.operand(at)?;
        let (register, negated) = match operand {
            Operand::Not(register) => (register, true),
            operand => (self.source_of(&operand, Type::Predicate)?, false),
        };
        match register {
            Register::Predicate(predicate) => Ok(Guard { predicate, negated }),
            _ => Err(self.unsupported("a predicate")),
        }
    }

    fn address(&mut self, at: usize) -> Result<Address> {
        match self.operand(at)? {
            Operand::Address(base, offset) => Ok(Address { base, offset }),
            operand => Err(self.unsupported(&format!("the address {operand:?}"))),
        }
    }

    fn list(&mut self, at: usize) -> Result<Vec<Operand>> {
        match self.operand(at)? {
            Operand::List(list) => Ok(list),
            operand => Err(self.unsupported(&format!("{operand:?} instead of a list"))),
        }
    }

    /// Returns the register rows of an operand that is a list of 32-bit words.
    fn words(&mut self, at: usize) -> Result<Vec<u32>> {
        let list = self.list(at)?;
        list.iter().map(|operand| self.word_of(operand)).collect()
    }

    /// Returns the value of an operand that must be a constant.
    fn immediate(&mut self, at: usize) -> Result<u64> {
        match self.operand(at)? {
            Operand::Number(text) => operand::number(&text, Type::S64)
                .ok_or_else(|| self.unsupported(&format!("the number `{text}`"))),
            operand => Err(self.unsupported(&format!("{operand:?} instead of a constant"))),
        }
    }

    fn finish(self) -> Result<()> {
        if !self.modifiers.is_empty() {
            return Err(self.unsupported(&format!("`.{}`", self.modifiers.join("."))));
        }
        if self.used.contains(&false) {
            return Err(self.unsupported("too many operands"));
        }
        Ok(())
    }
}
