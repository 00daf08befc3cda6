//! The gradient of a score mod's table: the plan and the launch of its kernel.

#[cfg(feature = "cube")]
pub(crate) mod launch;
pub mod plan;
