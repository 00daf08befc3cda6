//! The passes before and after an engine's kernels, each a folder with its kernel and its launch, and its plan where it has one, which
//! is there in builds without kernels, too. No pass knows an engine, except that the mma engine has a kernel for the bias gradient.

#[cfg(feature = "cuda")]
pub(crate) mod aligned;
#[cfg(feature = "cube")]
pub(crate) mod backward;
pub mod bias_gradient;
#[cfg(feature = "cube")]
pub(crate) mod combine;
#[cfg(feature = "cube")]
pub(crate) mod delta;
#[cfg(feature = "cube")]
pub(crate) mod lengths;
pub(crate) mod mask_bits;
#[cfg(feature = "cube")]
pub mod quantize;
#[cfg(feature = "cube")]
pub(crate) mod sum;
