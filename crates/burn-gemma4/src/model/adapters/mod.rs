//! LoRA adapters that each sequence of a batch selects. The adapters stay beside the base weights, which all sequences
//! share.

mod loaded;
mod pass;
mod stack;

pub use loaded::{AdapterId, LoadedAdapter};
pub(crate) use pass::{Factors, PassAdapters};
pub(crate) use stack::{AdapterStack, NO_ADAPTER};
