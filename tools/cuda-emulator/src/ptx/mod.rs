//! Parses PTX, NVIDIA's assembly language, and decodes PTX to instructions on rows of registers. A row has one value
//! per lane.

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
