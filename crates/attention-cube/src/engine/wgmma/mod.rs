//! The wgmma engine, for NVIDIA's Hopper: TMA, mbarriers and warpgroup matrix products.

#[cfg(feature = "cuda")]
pub(crate) mod backward;
#[cfg(feature = "cuda")]
pub(crate) mod chunked;
#[cfg(feature = "cuda")]
pub(crate) mod forward;
#[cfg(feature = "cuda")]
pub(crate) mod launch;
#[cfg(feature = "cuda")]
pub(crate) mod output;
pub mod plan;
#[cfg(all(test, feature = "cuda"))]
mod source;
#[cfg(feature = "cuda")]
pub(crate) mod zero_fill;
