//! The server of an embedding model: `/v1/embeddings` of OpenAI's API.

mod app;
mod handler;
mod request;
mod router;
mod server;

pub use server::EmbeddingServer;
