//! Kernels over the tiles of `tile`, forward and backward, whatever multiplies them: the unit engine and the cmma engine choose the tiles.

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
