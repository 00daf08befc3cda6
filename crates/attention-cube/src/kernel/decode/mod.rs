//! Decoding: the forward kernel with packed heads and split keys (`forward/mod.rs`), and the merge of its parts.

pub(crate) mod merge;
