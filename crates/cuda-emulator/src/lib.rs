//! CUDA's driver and its runtime compiler, on the processor, so that programs which use a GPU through CUDA run without one and are
//! looked at while they do. As a library it stands in for `libcuda.so` and `libnvrtc.so`; `docs/emulator.md` says what it checks.
//!
//! `driver` and `nvrtc` are what programs call, `ptx` reads what the real compiler makes of a kernel, and `cube` runs it,
//! with `matrix` for products of matrices and `numbers` for everything else that is computed.
#![warn(clippy::undocumented_unsafe_blocks)]
// Where there is no driver to stand in for, its parts are only tested.
#![cfg_attr(not(unix), allow(dead_code))]
// Rows of registers are indexed by lane, several at once.
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
