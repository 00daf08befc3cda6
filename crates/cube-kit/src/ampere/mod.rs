//! NVIDIA's matrix unit and copies from sm_80 (Ampere) on: `mma.sync`, `ldmatrix` and `cp.async`, which every later
//! architecture has, too.
//!
//! Operands lie in shared memory as subtiles of 64 columns, a row's eight pieces of 16 bytes permuted by its number (the
//! 128-byte swizzle of [`hopper`](crate::hopper)), so that neither `cp.async` nor `ldmatrix` meets a bank twice.

#![allow(
    missing_docs,
    reason = "CubeCL's macros make public items beside those that are documented here"
)]

#[cfg(feature = "cuda")]
pub mod barriers;
#[cfg(feature = "cuda")]
pub mod copy;
#[cfg(feature = "cuda")]
pub mod exchange;
#[cfg(feature = "cuda")]
pub mod few_rows;
#[cfg(feature = "cuda")]
pub mod product;
#[cfg(feature = "cuda")]
pub mod words;

/// Rows of a product's left operand, and so of an accumulator's fragment.
pub const FRAGMENT_ROWS: usize = 16;

/// Bytes of a barrier in shared memory, which starts at a multiple of as many.
pub const BARRIER_BYTES: usize = 8;
