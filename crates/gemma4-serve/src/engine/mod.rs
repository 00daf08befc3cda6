//! The engine: one thread that owns the model and decodes all requests together (continuous batching).
//!
//! Requests join and leave the batch between decode steps. Prompts are read in chunks between the steps, so that a long prompt
//! delays the other answers only by one chunk. A request is admitted only if its worst case fits into the KV cache. Events go
//! through channels that never block the engine, so a slow client does not delay the others. A client that leaves drops its receiver, and
//! its answers leave the batch before the next step.

mod adjust;
mod answer;
#[cfg(all(test, feature = "flex"))]
mod answer_tests;
mod constraint;
mod handle;
mod metrics;
mod request;
mod scheduler;
mod stop;

pub use constraint::{Constraint, Grammar, Grammars};
pub use handle::{Engine, EngineOptions};
pub use metrics::Metrics;
pub use request::{AnswerOptions, AnswerUsage, EndReason, Event, Request, TokenProbability};
