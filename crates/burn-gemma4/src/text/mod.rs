//! The text on both sides of the model: tokens, conversations, and what becomes of generated text.

pub(crate) mod chat;
pub(crate) mod parts;
pub(crate) mod stop;
pub(crate) mod tokenizer;
