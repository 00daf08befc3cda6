//! The forward and backward kernels of the portable engines. The module `tile_ops` multiplies their tiles.

#[cfg(feature = "cube")]
pub(crate) mod backward;
#[cfg(feature = "cube")]
pub(crate) mod forward;
#[cfg(feature = "cube")]
pub(crate) mod launch;
pub mod plan;
#[cfg(feature = "cube")]
pub(crate) mod softmax;
#[cfg(all(test, feature = "rocm"))]
mod source;
