//! Speculative decoding. The model evaluates several draft tokens in one forward pass, and accepts the draft tokens
//! that it would have chosen itself.
//!
//! Draft tokens come from earlier occurrences in the text (`decode/lookup.rs`) or from the drafter, a small model.

pub(crate) mod decode;
pub(crate) mod drafter;
pub(crate) mod drafts;
