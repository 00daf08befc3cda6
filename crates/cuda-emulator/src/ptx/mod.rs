//! PTX, NVIDIA's assembly: from its text to instructions that name rows of registers.

mod decode;
mod function;
mod instruction;
mod module;
mod operand;
mod registers;
mod text;
mod types;

pub use function::Function;
pub use instruction::*;
pub use module::Module;
pub use types::{Class, Register, SHARED_START, Space, Special, Type};
