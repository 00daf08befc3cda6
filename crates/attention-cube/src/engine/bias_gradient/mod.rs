//! The bias gradient, which the backward of every engine shares: its plan and its launch.

#[cfg(feature = "cube")]
pub(crate) mod launch;
pub mod plan;
