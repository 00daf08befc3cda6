//! Gemma 4 in [Burn](https://burn.dev): checkpoints from Hugging Face as they are, generation, training.

mod error;

pub use error::{Gemma4Error, TensorProblem};
