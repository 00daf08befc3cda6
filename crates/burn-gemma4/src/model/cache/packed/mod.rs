//! The keys and values of packed prompts: their rows, the keys that each of their tokens sees, and copies to the
//! buffers of KV caches.

pub(crate) mod copies;
pub(crate) mod destination;
pub(crate) mod intervals;
pub(crate) mod layout;
#[cfg(feature = "cube")]
mod tables;
