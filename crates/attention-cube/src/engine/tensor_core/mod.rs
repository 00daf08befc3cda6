//! The engines on NVIDIA's tensor cores: `mma` runs on Ampere and later GPUs, `wgmma` on Hopper. `common` holds the online
//! softmax, masks and outputs of both engines. The accumulators of both engines have the same register layout.

#[cfg(feature = "cuda")]
pub(crate) mod common;
pub mod mma;
pub mod wgmma;
