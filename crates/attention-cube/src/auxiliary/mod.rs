//! Auxiliary kernels that run before or after an engine's kernels. No auxiliary kernel depends on an engine.

#[cfg(feature = "cube")]
pub(crate) mod backward_kind;
#[cfg(feature = "cube")]
pub(crate) mod bias_gradient;
#[cfg(feature = "cube")]
pub(crate) mod combine;
#[cfg(feature = "cuda")]
pub(crate) mod contiguous_copy;
#[cfg(feature = "cube")]
pub(crate) mod delta;
#[cfg(feature = "cube")]
pub(crate) mod lengths;
pub(crate) mod mask_bits;
#[cfg(feature = "cube")]
pub(crate) mod pages;
#[cfg(feature = "cube")]
pub mod quantize;
#[cfg(feature = "cube")]
pub(crate) mod reduce;
#[cfg(feature = "cube")]
pub(crate) mod table_gradient;
