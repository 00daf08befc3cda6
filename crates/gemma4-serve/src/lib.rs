//! A server for Gemma 4 with the APIs of OpenAI and Anthropic, in pure Rust with [Burn](https://burn.dev).
//!
//! [`Server`] serves one model over HTTP. [`engine`] decodes many requests together, and can be used without HTTP.
//! [`EmbeddingServer`] serves an embedding model.
#![warn(missing_docs)]

mod batch_file;
mod batch_retries;
pub mod engine;
mod error;
mod http;
#[cfg(test)]
mod testing;
pub mod text;

pub use batch_file::{BatchCounts, BatchError, run_batch_file};
pub use error::{ErrorKind, RequestError};
pub use http::{
    AudioOptions, EmbeddingServer, ImageOptions, LOG_TARGET, MediaOptions, Server, ServerOptions,
};
