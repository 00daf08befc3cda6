//! The unit engine: kernels that need no plane operations, no matrix units, and little shared memory.

#[cfg(feature = "cube")]
pub(crate) mod backward;
#[cfg(feature = "cube")]
pub(crate) mod forward;
#[cfg(feature = "cube")]
pub(crate) mod launch;
pub mod plan;
#[cfg(feature = "cube")]
pub(crate) mod softmax;
