//! The passes before and after an engine's kernels, each a folder with its kernel and its launch.

#[cfg(feature = "cuda")]
pub(crate) mod aligned;
pub(crate) mod backward;
pub(crate) mod bias_gradient;
pub(crate) mod combine;
pub(crate) mod delta;
pub(crate) mod lengths;
#[cfg(feature = "cuda")]
pub(crate) mod mask_bits;
pub(crate) mod sum;
