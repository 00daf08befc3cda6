//! Gemma 4 in [Burn](https://burn.dev): checkpoints from Hugging Face as they are, generation, training.
//!
//! Empty until the operator it stands on is there: `attention-cube`.
