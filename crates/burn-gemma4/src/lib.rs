//! Gemma 4 in [Burn](https://burn.dev). The crate loads Hugging Face checkpoints and GGUF files without conversion,
//! generates text and trains models.
//!
//! [`Gemma4`] is a loaded checkpoint that generates text. [`Gemma4Model`] is the differentiable model without tokenizer
//! and chat template. [`EmbeddingGemma`] is a loaded checkpoint of EmbeddingGemma 2, which computes embeddings of texts.

mod audio;
mod cancellation;
mod checkpoint;
mod config;
mod embedding_gemma;
mod error;
mod escaped;
mod gemma;
mod generate;
mod json;
mod media_file;
mod media_hash;
mod media_size;
mod model;
mod op;
mod quant;
mod session;
mod speculative;
mod text;
mod train;
mod vision;

pub use audio::clip::Audio;
pub use audio::header::AudioHeader;
pub use audio::prepared::PreparedAudio;
pub use cancellation::Cancellation;
pub use checkpoint::adapter::{Adapter, AdapterTargets, AdapterWeights, TowerTargets};
pub use checkpoint::media_towers::{BatchMedia, MediaKinds, MediaTowers};
pub use checkpoint::{
    ExportForm, ExportOptions, ImportanceMatrix, LoadOptions, LoadProgress, Quantization,
    QuantizedCheckpoint, copy_beside, quantize_checkpoint,
};
pub use config::generation::GenerationDefaults;
pub use config::placeholders::Placeholders;
pub use config::sampling::Sampling;
pub use config::{
    ExpertsConfig, Gemma4Config, LayerType, RopeConfig,
    drafter::{DrafterConfig, OrderedEmbeddings},
    embedding_gemma::EmbeddingGemmaConfig,
};
pub use embedding_gemma::{EmbedOptions, EmbeddingGemma};
pub use error::{Gemma4Error, TensorProblem, catch_panic};
pub use escaped::Escaped;
pub use gemma::{Gemma4, Prompt};
pub use generate::decode::{
    Batch, DecodeMode, Decoder, DraftTokens, Next, Prefill, PrefixCache, RowChoice, RowLogits,
    RowResult,
};
pub use generate::encoded::EncodedPrompt;
pub use generate::logprobs::TokenLogprobs;
pub use generate::media_layout::MediaLayout;
pub use generate::sampling::sampler::Sampler;
pub use generate::{
    FinishReason, GenerateOptions, Generation, PromptEncoder, PromptGraphs, Timings, Token,
};
pub use media_hash::MediumHash;
pub use media_size::MediumSize;
pub use model::adapters::{AdapterId, LoadedAdapter};
pub use model::placement::{PerLayerTable, TablePlacement};
pub use model::{
    Gemma4Model, Logits,
    cache::{Cache, kind::CacheKind, precision::KvPrecision},
    embedding_gemma::{EmbeddingGemmaModel, PerLayerProjection},
    layer, observe,
    observe::Part,
};
pub use op::device_memory::DeviceMemory;
pub use op::device_use::DeviceUse;
pub use session::{SavedSession, Session};
pub use speculative::drafter::{Draft, Drafter, MaskedEmbedding};
pub use speculative::drafts::{DraftCounts, Drafts};
pub use text::{
    chat::{ChatOptions, ChatTemplate, Content, Message, MessagePart, Role},
    parts::{Parts, TextKind},
    tokenizer::{Marking, Tokenizer, stream::TextStream},
};
pub use train::graph_capture::{GradientRecorder, TrainBatch};
pub use train::media::PlacedMedia;
pub use train::packing::Packing;
pub use vision::image::{Image, ImageHeader};
pub use vision::prepared::PreparedImage;
pub use vision::prepared_video::PreparedVideo;
pub use vision::video::{Video, VideoOptions};

pub mod update {
    //! The last part of a training step: the sum of squares for the global gradient norm, and AdamW in f32. AdamW
    //! multiplies the gradients by a clipping factor. On a GPU, one launch adds up the squares of up to six gradients,
    //! and one launch updates a parameter.

    pub use crate::op::adamw::{AdamW, ParamUpdate, SumOfSquares, rounded};
}
