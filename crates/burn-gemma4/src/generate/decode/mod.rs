//! Decoding: decode steps of one token per sequence, and forward passes over several draft tokens.
//!
//! To *read* a token means to run the model over the token and to append the token's keys and values to the KV cache. A
//! *column* of the cache is one token position of every sequence. A *drafting round* is a run of the drafter that
//! proposes draft tokens.

#[cfg(feature = "cube")]
mod ahead;
mod batch;
mod decoder;
mod drafting;
#[cfg(feature = "cube")]
mod graph;
mod guessed;
#[cfg(feature = "cube")]
mod inputs;
mod mode;
mod next;
mod packed;
#[cfg(feature = "cube")]
mod position;
mod prefill;
mod prefill_media;
mod prefix_cache;
#[cfg(feature = "cube")]
mod round;
mod row_logits;

pub use batch::Batch;
pub use decoder::Decoder;
pub use guessed::DraftTokens;
pub(crate) use guessed::Streams;
pub use mode::DecodeMode;
pub use next::Next;
pub use prefill::Prefill;
pub use prefix_cache::PrefixCache;
pub use row_logits::{RowChoice, RowLogits, RowResult};
