//! The engines on NVIDIA's tensor cores: `mma` runs on Ampere and later GPUs, `wgmma` on Hopper. The module `common`
//! holds the code for online softmax, masks and outputs, which both engines use. They can use the same code because
//! their accumulators have the same register layout.

#[cfg(feature = "cuda")]
pub(crate) mod common;
pub mod mma;
pub mod wgmma;
