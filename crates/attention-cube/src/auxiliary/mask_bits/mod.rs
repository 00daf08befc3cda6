//! Packs a bool mask into bits, for engines whose threads load a few 32-bit words instead of one byte per score.

#[cfg(feature = "cuda")]
pub(crate) mod kernel;
#[cfg(feature = "cuda")]
pub(crate) mod launch;
pub(crate) mod plan;
