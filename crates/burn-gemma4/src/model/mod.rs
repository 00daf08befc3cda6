//! The Gemma 4 text model: from token ids to logits.

pub(crate) mod adapters;
pub(crate) mod audio;
mod buffer_pool;
pub(crate) mod cache;
mod calls;
#[cfg(feature = "cube")]
pub(crate) mod decode_ops;
pub(crate) mod embedding_gemma;
#[cfg(feature = "cube")]
mod embeddings;
pub(crate) mod forward;
pub(crate) mod host_table;
pub mod layer;
mod logits;
pub(crate) mod multimodal;
pub mod observe;
pub(crate) mod packed_prompts;
pub(crate) mod per_layer;
pub(crate) mod placement;
pub(crate) mod prefill_ops;
#[cfg(feature = "cube")]
pub(crate) mod prompt_pass;
pub(crate) mod row_rules;
pub(crate) mod soft_tokens;
pub(crate) mod split_table;
mod text_model;
pub(crate) mod tokens;
pub(crate) mod vision;
pub(crate) mod weights;

pub use logits::Logits;
pub use text_model::Gemma4Model;
