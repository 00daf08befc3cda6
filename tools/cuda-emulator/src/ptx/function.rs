//! Parses the body of a kernel: declarations, statements and labels in nested scopes. Decodes the statements to
//! instructions.

use std::collections::HashMap;

use super::decode;
use super::instruction::{Guard, Instruction, Operation};
use super::module::Variable;
use super::operand::{self, Names};
use super::registers::Registers;
use super::text::{Cursor, split_list};
use super::types::{Register, SHARED_START, Type};
use crate::fault::Fault;

/// The position of one argument in the buffer of a kernel's arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub offset: usize,
    pub bytes: usize,
}

/// A decoded kernel that is ready to run.
#[derive(Debug)]
pub struct Function {
    pub name: String,
    pub parameters: Vec<Parameter>,
    pub parameter_bytes: usize,
    pub registers: Registers,
    pub instructions: Vec<Instruction>,
    /// The PTX text of each instruction, for error messages.
    pub texts: Vec<String>,
    /// The size of static shared memory in bytes. Dynamic shared memory follows the static part.
    pub static_shared: usize,
    /// The size of local memory per thread in bytes.
    pub local_bytes: usize,
    /// True if the kernel has atomic operations. The thread blocks of such a kernel may communicate through memory, so
    /// the order of the blocks matters.
    pub has_atomics: bool,
}

/// The variables of a module, which all functions of the module share.
pub struct Globals<'a> {
    /// The addresses of the module's variables in global memory.
    pub addresses: &'a HashMap<String, u64>,
    /// The module's variables in shared memory. A variable of dynamic size has 0 bytes.
    pub shared: &'a [Variable],
}

#[derive(Default)]
struct Scope {
    parent: Option<usize>,
    registers: HashMap<String, Register>,
    labels: HashMap<String, usize>,
}

struct Statement<'a> {
    scope: usize,
    text: &'a str,
}

#[derive(Default)]
struct Body<'a> {
    scopes: Vec<Scope>,
    statements: Vec<Statement<'a>>,
    registers: Registers,
    symbols: HashMap<String, u64>,
    shared: usize,
    local: usize,
}

/// Parses a function from its parameters to its end. The caller has already parsed the function's name.
///
/// # Errors
/// Returns an error with the text that is unknown or not emulated.
pub fn parse(name: &str, cursor: &mut Cursor, globals: &Globals) -> Result<Function, Fault> {
    let mut body = Body::default();
    body.symbols.extend(
        globals
            .addresses
            .iter()
            .map(|(name, at)| (name.clone(), *at)),
    );
    let (parameters, parameter_bytes) = body.read_parameters(cursor)?;
    for variable in globals.shared.iter().filter(|shared| shared.bytes > 0) {
        body.declare_shared(variable);
    }
    cursor.through('{');
    body.read_statements(cursor)?;
    // Dynamic shared memory starts after the static shared memory, at an address that is aligned as the dynamic
    // variable requires.
    for variable in globals.shared.iter().filter(|shared| shared.bytes == 0) {
        body.shared = body.shared.next_multiple_of(variable.alignment);
        body.declare_shared(variable);
    }

    let mut instructions = Vec::new();
    for statement in &body.statements {
        let registers = &mut body.registers;
        let names = Place {
            scopes: &body.scopes,
            scope: statement.scope,
            symbols: &body.symbols,
        };
        instructions.push(
            instruction(statement.text, &names, registers)
                .map_err(|fault| fault.at(&format!(" in `{}`", one_line(statement.text))))?,
        );
    }
    let has_atomics = instructions
        .iter()
        .any(|instruction| matches!(instruction.operation, Operation::Atomic(_)));
    Ok(Function {
        name: name.to_string(),
        parameters,
        parameter_bytes,
        registers: body.registers,
        instructions,
        texts: body.statements.iter().map(|s| one_line(s.text)).collect(),
        static_shared: body.shared,
        local_bytes: body.local,
        has_atomics,
    })
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl<'a> Body<'a> {
    fn read_parameters(&mut self, cursor: &mut Cursor) -> Result<(Vec<Parameter>, usize), Fault> {
        let mut parameters = Vec::new();
        let mut end = 0usize;
        if cursor.peek() != Some('(') {
            return Ok((parameters, end));
        }
        cursor.skip();
        for text in split_list(cursor.through(')')) {
            let variable = Variable::parse(text)?;
            let offset = end.next_multiple_of(variable.alignment);
            self.symbols.insert(variable.name, offset as u64);
            end = offset + variable.bytes;
            parameters.push(Parameter {
                offset,
                bytes: variable.bytes,
            });
        }
        Ok((parameters, end))
    }

    fn declare_shared(&mut self, variable: &Variable) {
        self.shared = self.shared.next_multiple_of(variable.alignment);
        let address = SHARED_START + self.shared as u64;
        self.symbols.insert(variable.name.clone(), address);
        self.shared += variable.bytes;
    }

    fn read_statements(&mut self, cursor: &mut Cursor<'a>) -> Result<(), Fault> {
        self.scopes.push(Scope::default());
        let mut scope = 0;
        loop {
            match cursor.peek() {
                Some('{') => {
                    cursor.skip();
                    self.scopes.push(Scope {
                        parent: Some(scope),
                        ..Scope::default()
                    });
                    scope = self.scopes.len() - 1;
                    continue;
                }
                Some('}') => {
                    cursor.skip();
                    match self.scopes[scope].parent {
                        Some(parent) => scope = parent,
                        None => return Ok(()),
                    }
                    continue;
                }
                Some(_) => {}
                None => return Err(Fault::Syntax("a function without an end".into())),
            }
            if let Some(label) = cursor.label() {
                let at = self.statements.len();
                self.scopes[scope].labels.insert(label.to_string(), at);
                continue;
            }
            let text = cursor.statement();
            if let Some(list) = text.strip_prefix(".reg") {
                self.declare_registers(scope, list)?;
            } else if text.starts_with(".shared") {
                self.declare_shared(&Variable::parse(text)?);
            } else if text.starts_with(".local") {
                let variable = Variable::parse(text)?;
                let at = self.local.next_multiple_of(variable.alignment);
                self.symbols.insert(variable.name, at as u64);
                self.local = at + variable.bytes;
            } else if text.starts_with(".pragma") || text.is_empty() {
                // A `.pragma` only advises NVIDIA's assembler, so the parser skips it.
            } else if text.starts_with('.') {
                return Err(Fault::Unsupported(format!("the declaration `{text}`")));
            } else {
                self.statements.push(Statement { scope, text });
            }
        }
    }

    /// Parses a declaration of registers: a numbered range such as `.b32 %r<5>`, or a type and a list of names.
    fn declare_registers(&mut self, scope: usize, list: &str) -> Result<(), Fault> {
        let unknown = || Fault::Unsupported(format!("registers `{list}`"));
        let (spelled, names) = list
            .trim()
            .split_once(char::is_whitespace)
            .ok_or_else(unknown)?;
        let number = spelled
            .strip_prefix('.')
            .and_then(Type::of)
            .ok_or_else(unknown)?;
        for name in split_list(names) {
            let declared = match name.strip_suffix('>').and_then(|name| name.split_once('<')) {
                Some((base, count)) => {
                    let count: usize = count.trim().parse().map_err(|_| unknown())?;
                    (0..count).map(|k| format!("{base}{k}")).collect()
                }
                None => vec![name.to_string()],
            };
            for name in declared {
                let register = self.registers.add(number.class());
                self.scopes[scope].registers.insert(name, register);
            }
        }
        Ok(())
    }
}

/// The names that are visible in a scope. These names are declared in the scope itself or in an enclosing scope.
struct Place<'a> {
    scopes: &'a [Scope],
    scope: usize,
    symbols: &'a HashMap<String, u64>,
}

impl Place<'_> {
    fn find<T: Copy>(&self, get: impl Fn(&Scope) -> Option<T>) -> Option<T> {
        let mut scope = Some(self.scope);
        while let Some(at) = scope {
            let here = &self.scopes[at];
            if let Some(found) = get(here) {
                return Some(found);
            }
            scope = here.parent;
        }
        None
    }
}

impl Names for Place<'_> {
    fn register(&self, name: &str) -> Option<Register> {
        self.find(|scope| scope.registers.get(name).copied())
    }

    fn symbol(&self, name: &str) -> Option<u64> {
        self.symbols.get(name).copied()
    }
}

fn instruction(text: &str, place: &Place, registers: &mut Registers) -> Result<Instruction, Fault> {
    let (guard, text) = match text.strip_prefix('@') {
        Some(rest) => {
            let (condition, rest) = rest
                .trim_start()
                .split_once(char::is_whitespace)
                .ok_or_else(|| Fault::Syntax("a guard without an instruction".into()))?;
            (Some(condition_of(condition, place)?), rest.trim_start())
        }
        None => (None, text),
    };
    let (opcode, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let operands = split_list(operands);
    let mut words = opcode.split('.');
    if words.next() == Some("bra") {
        let label = operands.first().copied().unwrap_or_default();
        let target = place
            .find(|scope| scope.labels.get(label).copied())
            .ok_or_else(|| Fault::Syntax(format!("no label `{label}`")))?;
        return Ok(Instruction {
            guard,
            operation: Operation::Branch(target as u32),
        });
    }
    let operands = operands
        .iter()
        .map(|operand| operand::parse(operand, place))
        .collect::<Result<_, _>>()?;
    Ok(Instruction {
        guard,
        operation: decode::decode(opcode, operands, registers)?,
    })
}

fn condition_of(text: &str, place: &Place) -> Result<Guard, Fault> {
    let (negated, name) = match text.strip_prefix('!') {
        Some(name) => (true, name),
        None => (false, text),
    };
    match place.register(name) {
        Some(Register::Predicate(predicate)) => Ok(Guard { predicate, negated }),
        _ => Err(Fault::Syntax(format!("the condition `{text}`"))),
    }
}
