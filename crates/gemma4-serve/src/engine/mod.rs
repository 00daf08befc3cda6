//! The engine: one thread that owns the model and decodes all requests together (continuous batching).
//!
//! Answers join and leave the batch between decode steps. Prompts are prefilled in chunks between decode steps, so a long
//! prompt delays other answers by one chunk only.
//!
//! The engine admits a request only if the KV cache has room for the largest possible answers.
//!
//! The engine sends events through unbounded channels, so a slow client does not delay other clients. When a client
//! disconnects, the server drops the receiver of the events. The engine then removes the client's answers before the next
//! decode step.
//!
//! An [`EnginePool`] has one engine for each device, and chooses the engine of each request.
//!
//! A prompt may have images and audio. Their towers run in steps that take about as long as a chunk of a prompt, so
//! they do not delay other answers for longer.
//!
//! An [`EmbeddingEngine`] embeds the texts of many requests together.
//!
//! A request may select a LoRA adapter. Answers of all adapters, and answers without one, are decoded in the same step.

mod adapters;
mod adjust;
mod affinity;
mod answer;
#[cfg(all(test, feature = "flex"))]
mod answer_tests;
mod constraint;
#[cfg(all(test, feature = "flex"))]
mod constraint_tests;
mod device_adapters;
mod embeddings;
mod front;
mod handle;
mod load;
mod media_memory;
mod metrics;
mod pool;
#[cfg(all(test, feature = "flex"))]
mod pool_tests;
mod request;
mod scheduler;
mod shared;
mod stop;
mod supervise;

pub use adapters::ServedAdapter;
pub use constraint::{Constraint, Grammar, Grammars};
pub(crate) use embeddings::at_input;
pub use embeddings::{EmbeddingEngine, EmbeddingEngineOptions, EmbeddingRequest, Embeddings};
pub use handle::{DEFAULT_MAX_ADAPTERS, DEFAULT_PREFIX_CACHE_BYTES, Engine, EngineOptions};
pub use media_memory::{MediaMemory, MediaPool};
pub(crate) use media_memory::{permits, reserved_bytes};
pub use metrics::Metrics;
pub use pool::{AnswerEvents, EnginePool, PoolEnd};
pub use request::{AnswerOptions, AnswerUsage, EndReason, Event, Request, TokenProbability};
