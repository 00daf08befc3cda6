//! What CubeCL kernels for Burn stand on: [launches](launch) and [rounding] on any device, and for NVIDIA's [Ampere](ampere) and [Hopper](hopper)
//! their instructions behind names and, on the latter, a [matrix product](matmul).

#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]

pub mod ampere;
pub mod hopper;
#[cfg(feature = "cube")]
pub mod launch;
pub mod matmul;
#[cfg(feature = "cube")]
pub mod overlap;
#[cfg(feature = "cube")]
pub mod rounding;
