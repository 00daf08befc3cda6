//! Gemma 4 in [Burn](https://burn.dev): checkpoints from Hugging Face as they are, generation, training.

mod chat;
mod defaults;
mod error;
mod sampling;
mod tokenizer;

pub use chat::{ChatOptions, ChatTemplate, Message, Role};
pub use defaults::GenerationDefaults;
pub use error::{Gemma4Error, TensorProblem};
pub use sampling::{Sampler, Sampling};
pub use tokenizer::{TextStream, Tokenizer};
