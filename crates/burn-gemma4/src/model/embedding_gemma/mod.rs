//! The EmbeddingGemma 2 model: an encoder of Gemma 4's layers, the mean over each text, and a projection.

mod model;
mod packed_texts;

pub use model::{EmbeddingGemmaModel, PerLayerProjection};
pub(crate) use packed_texts::PackedTexts;
