//! The engines on NVIDIA's tensor cores: `mma` runs on Ampere and later GPUs, `wgmma` on Hopper.
//!
//! Both engines use the same register layout of an accumulator. `common` holds the online softmax, masks and outputs for that
//! layout.

#[cfg(feature = "cuda")]
pub(crate) mod common;
pub mod mma;
pub mod wgmma;
