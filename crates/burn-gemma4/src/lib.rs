//! Gemma 4 in [Burn](https://burn.dev): checkpoints from Hugging Face and GGUF files as they are, generation, training.
//!
//! [`Gemma4`] is a checkpoint that can be asked; [`Gemma4Model`] is the model alone, differentiable. Every attention goes
//! through [`attention_cube::fused_attention`], at head sizes 256 and 512 alike, on every device that it serves.

mod checkpoint;
mod config;
mod drafter;
mod error;
mod escaped;
mod gemma;
mod generate;
mod json;
mod model;
mod op;
mod quantized;
mod session;
mod text;
mod train;

pub use checkpoint::{
    LoadOptions, LoadProgress, Quantization, QuantizedCheckpoint,
    adapter::Adapter,
    copy_beside,
    placement::{DeviceMemory, PerLayerTable, TablePlacement},
    quantize_checkpoint,
};
pub use config::{
    ExpertsConfig, Gemma4Config, LayerType, RopeConfig,
    drafter::{DrafterConfig, OrderedEmbeddings},
};
pub use drafter::{Drafter, Guesses, MaskedEmbedding};
pub use error::{Gemma4Error, TensorProblem};
pub use escaped::Escaped;
pub use gemma::{Gemma4, Prompt};
pub use generate::{
    FinishReason, GenerateOptions, Generation, Timings, Token,
    cancellation::Cancellation,
    decode::{DecodeMode, Decoder, GuessedTokens, Next},
    defaults::GenerationDefaults,
    draft::{DraftCounts, Drafts},
    logprobs::TokenLogprobs,
    sampling::{Sampling, sampler::Sampler},
};
pub use model::{
    Gemma4Model, Logits,
    cache::{
        Cache,
        kind::{CacheKind, KvPrecision},
    },
    layer, observe,
    observe::Part,
};
pub use session::{SavedSession, Session};
pub use text::{
    chat::{ChatOptions, ChatTemplate, Message, Role},
    parts::TextKind,
    tokenizer::{Marking, Tokenizer, stream::TextStream},
};
pub use train::{
    packing::Packing,
    recorder::{GradientRecorder, Lesson},
};

pub mod update {
    //! What a step of training does with each parameter, in one launch on a GPU: a share of the norm of all gradients, their factor,
    //! AdamW in f32.

    pub use crate::op::update::{AdamW, SumOfSquares, Trained, rounded};
}
