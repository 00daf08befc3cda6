//! The register rows of a kernel's warps. A row is one register of a warp, with a value per lane. Each constant and
//! each special register that the kernel reads gets a row as well, so every operand is a row.

use std::collections::HashMap;

use super::types::{Class, Register, Special};

#[derive(Debug, Default)]
pub struct Registers {
    pub predicates: usize,
    pub words: usize,
    pub doubles: usize,
    constants: HashMap<(Class, u64), Register>,
    specials: HashMap<(Class, Special), Register>,
}

impl Registers {
    /// Adds a row of the given class.
    pub fn add(&mut self, class: Class) -> Register {
        let (count, register): (_, fn(u32) -> Register) = match class {
            Class::Predicate => (&mut self.predicates, Register::Predicate),
            Class::Word => (&mut self.words, Register::Word),
            Class::Double => (&mut self.doubles, Register::Double),
        };
        *count += 1;
        register(*count as u32 - 1)
    }

    /// Returns the row that has `value` in every lane. Adds the row if it does not exist.
    pub fn constant(&mut self, class: Class, value: u64) -> Register {
        let value = match class {
            Class::Predicate => value & 1,
            Class::Word => value & u64::from(u32::MAX),
            Class::Double => value,
        };
        if let Some(register) = self.constants.get(&(class, value)) {
            return *register;
        }
        let register = self.add(class);
        self.constants.insert((class, value), register);
        register
    }

    /// Returns the row with the values of a special register. Adds the row if it does not exist.
    pub fn special(&mut self, class: Class, special: Special) -> Register {
        if let Some(register) = self.specials.get(&(class, special)) {
            return *register;
        }
        let register = self.add(class);
        self.specials.insert((class, special), register);
        register
    }

    /// Returns an iterator over the rows of constants, each with its value.
    pub fn constants(&self) -> impl Iterator<Item = (Register, u64)> {
        self.constants
            .iter()
            .map(|((_, value), register)| (*register, *value))
    }

    /// Returns an iterator over the rows of special registers.
    pub fn specials(&self) -> impl Iterator<Item = (Register, Special)> {
        self.specials
            .iter()
            .map(|((_, special), register)| (*register, *special))
    }
}
