//! Building blocks of CubeCL kernels for Burn: [launches](launch), [rounding] and [programmatic dependent launch](pdl).
//!
//! For NVIDIA GPUs, the crate has items common to all tensor cores ([nvidia]), the instructions of [Ampere](ampere) and
//! [Hopper](hopper), and a GEMM for each of them.

#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]

pub mod ampere;
pub mod hopper;
#[cfg(feature = "cube")]
pub mod launch;
pub mod nvidia;
#[cfg(feature = "cube")]
pub mod pdl;
#[cfg(feature = "cube")]
pub mod rounding;
