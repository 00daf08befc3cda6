//! Matrix products on Hopper.

#[cfg(feature = "cuda")]
pub(crate) mod kernel;
#[cfg(feature = "cuda")]
pub(crate) mod launch;
pub mod plan;
#[cfg(feature = "cuda")]
pub(crate) mod text;
