//! Training data: text files and conversations, their images and audio, their tokens, packed rows, and batches.

pub mod conversations;
pub mod corpus;
pub mod documents;
pub mod loader;
pub mod media;
pub mod packing;
pub mod schedule;
pub mod train_tokenizer;
