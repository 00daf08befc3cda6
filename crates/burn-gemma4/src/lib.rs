//! Gemma 4 in [Burn](https://burn.dev): checkpoints from Hugging Face as they are, generation, training.
//!
//! [`Gemma4`] is a checkpoint that can be asked; [`Gemma4Model`] is the model alone, differentiable. Every attention goes
//! through [`attention_cube::fused_attention`], at head sizes 256 and 512 alike, on every device that it serves.

pub mod layer;
pub mod observe;

mod adapter;
mod cache;
mod cancellation;
mod chat;
mod checkpoint;
mod config;
mod decode;
mod defaults;
mod error;
mod gemma;
mod generate;
mod gradients;
#[cfg(feature = "cube")]
mod kernel;
mod logprobs;
mod loss;
mod model;
mod packing;
mod parts;
mod sampling;
mod stop;
mod tokenizer;

pub use adapter::Adapter;
pub use cache::Cache;
pub use cancellation::Cancellation;
pub use chat::{ChatOptions, ChatTemplate, Message, Role};
pub use checkpoint::{LoadOptions, LoadProgress};
pub use config::{ExpertsConfig, Gemma4Config, LayerType, RopeConfig};
pub use decode::{DecodeMode, Decoder, Next, Part};
pub use defaults::GenerationDefaults;
pub use error::{Gemma4Error, TensorProblem};
pub use gemma::{Gemma4, Prompt, Session};
pub use generate::{FinishReason, GenerateOptions, Generation, Timings, Token};
pub use logprobs::TokenLogprobs;
pub use model::{Gemma4Model, Logits};
pub use packing::Packing;
pub use parts::TextKind;
pub use sampling::{Sampler, Sampling};
pub use tokenizer::{TextStream, Tokenizer};
