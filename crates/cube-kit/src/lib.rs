//! What CubeCL kernels for Burn stand on: [launches](launch) on any device, and for NVIDIA's [Hopper](hopper) its instructions behind
//! names and a [matrix product](matmul).

#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]

pub mod hopper;
#[cfg(feature = "cube")]
pub mod launch;
pub mod matmul;
