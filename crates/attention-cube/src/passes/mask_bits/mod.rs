//! A bool mask as bits, for engines whose threads have a few words to read of it and not a byte a score.

#[cfg(feature = "cuda")]
pub(crate) mod kernel;
#[cfg(feature = "cuda")]
pub(crate) mod launch;
pub(crate) mod plan;
