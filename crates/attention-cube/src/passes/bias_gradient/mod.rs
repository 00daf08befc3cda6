//! The gradient of the bias, of any engine's backward.

#[cfg(feature = "cube")]
mod launch;
pub mod plan;
#[cfg(feature = "cube")]
mod rows;
#[cfg(feature = "cube")]
pub(crate) mod scores;
