//! A CUDA emulator: a replacement for CUDA's driver and runtime compiler (`libcuda.so` and `libnvrtc.so`) that runs kernels
//! on the CPU. The emulator also checks the kernels for errors. The file `docs/emulator.md` lists the checks.
//!
//! The modules `driver` and `nvrtc` contain the functions that programs call. The real compiler produces PTX, which
//! `ptx` decodes and `cube` executes. The module `matrix` computes matrix instructions, and `numbers` computes all
//! other arithmetic.
//!
//! In this code, a cube is a thread block. A row is one register of a warp, with one value per lane. A word is a 32-bit
//! register, a double is a 64-bit register, and a half is a 16-bit float (f16 or bf16).
#![warn(clippy::undocumented_unsafe_blocks)]
// Only Unix systems have a driver that the emulator can replace. On other systems, only the tests use the modules.
#![cfg_attr(not(unix), allow(dead_code))]
// A loop over lanes indexes several register rows at once. Clippy would suggest an iterator over one of these rows.
#![allow(clippy::needless_range_loop)]

#[cfg(unix)]
mod card;
mod cube;
#[cfg(unix)]
mod driver;
mod fault;
mod matrix;
mod numbers;
#[cfg(unix)]
mod nvrtc;
mod ptx;
