//! The engines on NVIDIA's tensor cores: `mma` runs on Ampere and later GPUs, `wgmma` on Hopper. `common` holds the online
//! softmax, masks and outputs of both engines, which use one register layout of accumulators.

#[cfg(feature = "cuda")]
pub(crate) mod common;
pub mod mma;
pub mod wgmma;
