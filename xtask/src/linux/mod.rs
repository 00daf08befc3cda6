//! Set-up of a Linux machine: a Vulkan driver for the tests, LLVM for builds with CUDA.

mod apt;
mod llvm;
mod vulkan;

pub use llvm::{llvm, llvm_if_possible};
pub use vulkan::graphics;
