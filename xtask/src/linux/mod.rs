//! Sets up a Linux machine: a Vulkan driver for the tests, LLVM for builds with CUDA, and MPI for training in several
//! processes. Also installs an emulator of ARM.

mod aarch64;
mod apt;
mod llvm;
mod mpi;
mod vulkan;

pub use aarch64::{AARCH64_LINKER, AARCH64_RUNNER, aarch64};
pub use llvm::{llvm, llvm_if_possible};
pub use mpi::{has_mpi, mpi_if_possible};
pub use vulkan::graphics;
