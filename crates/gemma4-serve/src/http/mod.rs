//! The HTTP server: the endpoints of each API, and the code that the APIs share.

mod adapters;
mod answers;
mod anthropic;
mod app;
mod body;
mod body_memory;
mod chat_prompt;
mod client_state;
mod connections;
mod embeddings;
mod events;
mod form;
mod listener;
mod media;
mod openai;
mod overrides;
mod page;
mod request_log;
mod router;
mod server;
mod serving;
mod stream;

pub use app::ServerOptions;
pub use embeddings::EmbeddingServer;
pub use media::{AudioOptions, ImageOptions, MediaOptions};
pub(crate) use openai::MAX_PROMPTS;
pub use request_log::LOG_TARGET;
pub use server::Server;
