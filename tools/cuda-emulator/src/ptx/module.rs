//! A PTX module: its variables and its kernels.

use std::collections::HashMap;

use super::function::{self, Function, Globals};
use super::operand;
use super::text::{Cursor, split_list, without_comments};
use super::types::Type;
use crate::fault::Fault;

/// A variable that a PTX module or kernel declares, such as `.align 16 .b8 name[64]`.
#[derive(Clone, Debug)]
pub struct Variable {
    pub name: String,
    pub number: Type,
    pub alignment: usize,
    pub bytes: usize,
}

impl Variable {
    /// Parses a declaration of a variable. The memory space in the declaration is ignored.
    ///
    /// # Errors
    /// Returns an error if the declaration lacks a type or a name.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let wrong = || Fault::Syntax(format!("the declaration `{text}`"));
        let mut words = text.split_whitespace();
        let (mut number, mut alignment, mut of_pointer) = (None, None, false);
        let mut elements = 1;
        let mut name = String::new();
        while let Some(word) = words.next() {
            match word {
                // The attributes after `.ptr` describe the target of the pointer, not the variable itself.
                ".ptr" => of_pointer = true,
                ".align" => {
                    let bytes: usize = words
                        .next()
                        .and_then(|w| w.parse().ok())
                        .ok_or_else(wrong)?;
                    if !of_pointer && bytes.is_power_of_two() {
                        alignment = Some(bytes);
                    }
                }
                ".v2" => elements = 2,
                ".v4" => elements = 4,
                _ => match word.strip_prefix('.') {
                    Some(spelled) => number = number.or(Type::of(spelled)),
                    None => name.push_str(word),
                },
            }
        }
        let number = number.ok_or_else(wrong)?;
        let natural = number.bytes() * elements;
        let (name, lengths) = match name.split_once('[') {
            Some((name, lengths)) => (name.to_string(), Some(lengths.to_string())),
            None => (name, None),
        };
        if name.is_empty() {
            return Err(wrong());
        }
        if let Some(lengths) = lengths {
            for length in lengths.trim_end_matches(']').split("][") {
                elements *= match length {
                    "" => 0,
                    length => length.parse().map_err(|_| wrong())?,
                };
            }
        }
        Ok(Self {
            name,
            number,
            alignment: alignment.unwrap_or(natural),
            bytes: number.bytes() * elements,
        })
    }
}

/// A parsed module: its kernels by name, and the memory of its variables.
#[derive(Debug, Default)]
pub struct Module {
    pub functions: HashMap<String, Function>,
    /// The memory of the module's variables. A kernel accesses a variable by its address.
    pub variables: Vec<Box<[u8]>>,
}

/// The directives without a semicolon. Such a directive ends at the end of its line.
const LINE_DIRECTIVES: [&str; 5] = [".version", ".target", ".address_size", ".file", ".loc"];

impl Module {
    /// Parses a module.
    ///
    /// # Errors
    /// Returns an error with the name of the kernel, and the text that is unknown or not emulated.
    pub fn parse(source: &str) -> Result<Self, Fault> {
        let text: String = without_comments(source)
            .lines()
            .filter(|line| {
                let first = line.split_whitespace().next().unwrap_or_default();
                !LINE_DIRECTIVES.contains(&first)
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        let mut cursor = Cursor::new(&text);
        let mut module = Self::default();
        let mut addresses = HashMap::new();
        let mut shared = Vec::new();
        while cursor.peek().is_some() {
            let head = cursor.until(&['{', '(', ';', '=']);
            if head.contains(".section") {
                cursor.skip_block();
            } else if head.contains(".entry") {
                let name = head.split_whitespace().last().unwrap_or_default();
                let globals = Globals {
                    addresses: &addresses,
                    shared: &shared,
                };
                let function = function::parse(name, &mut cursor, &globals)
                    .map_err(|fault| fault.at(&format!(", kernel {name}")))?;
                module.functions.insert(name.to_string(), function);
            } else if head.contains(".func") {
                // A declaration or definition of a function that is not a kernel is skipped. If a kernel calls the
                // function, the decoder refuses the call.
                cursor.until(&['{', ';']);
                match cursor.peek() {
                    Some('{') => cursor.skip_block(),
                    _ => cursor.skip(),
                }
            } else if head.contains(".shared") {
                shared.push(Variable::parse(head)?);
                cursor.through(';');
            } else if head.is_empty() || head.starts_with(".pragma") {
                cursor.through(';');
            } else {
                let variable = Variable::parse(head)?;
                let initial = cursor.through(';');
                let (memory, address) = global(&variable, initial)?;
                addresses.insert(variable.name, address);
                module.variables.push(memory);
            }
        }
        Ok(module)
    }
}

/// Allocates a variable in global memory, and initializes it with the values after `=` in its declaration. Returns the
/// allocated memory, and the variable's aligned address in that memory.
fn global(variable: &Variable, initial: &str) -> Result<(Box<[u8]>, u64), Fault> {
    let mut memory = vec![0; variable.bytes + variable.alignment].into_boxed_slice();
    let start = memory.as_ptr() as usize;
    let padding = start.next_multiple_of(variable.alignment) - start;
    let width = variable.number.bytes();
    let values = initial.trim_start_matches('=').replace(['{', '}'], " ");
    for (k, text) in split_list(&values).iter().enumerate() {
        let value = operand::number(text, variable.number)
            .ok_or_else(|| Fault::Syntax(format!("the value `{text}` of {}", variable.name)))?;
        let at = padding + k * width;
        memory
            .get_mut(at..at + width)
            .ok_or_else(|| Fault::Syntax(format!("too many values of {}", variable.name)))?
            .copy_from_slice(&value.to_le_bytes()[..width]);
    }
    Ok((memory, (start + padding) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_have_size_and_alignment() {
        let of = |text: &str| {
            let variable = Variable::parse(text).unwrap();
            (variable.name, variable.alignment, variable.bytes)
        };
        assert_eq!(of(".param .u64 a"), ("a".into(), 8, 8));
        assert_eq!(
            of(".param .u64 .ptr .global .align 1 a"),
            ("a".into(), 8, 8)
        );
        assert_eq!(
            of(".shared .align 16 .b8 tile[4][32]"),
            ("tile".into(), 16, 128)
        );
        assert_eq!(
            of(".extern .shared .align 1024 .b8 all[]"),
            ("all".into(), 1024, 0)
        );
    }

    #[test]
    fn variables_have_their_initial_values() {
        let module =
            Module::parse(".version 8.0\n.global .align 4 .b32 table[3] = {1, -1};").unwrap();
        let memory = &module.variables[0];
        let at = memory.as_ptr().align_offset(4);
        assert_eq!(
            memory[at..at + 12],
            [1, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0]
        );
    }
}
