//! Loads checkpoints: safetensors files in Hugging Face's layout, and GGUF files.

pub(crate) mod adapter;
mod audio;
mod drafter;
mod embedding_gemma;
mod export;
mod files;
mod floats8;
mod folder;
pub(crate) mod gguf;
mod host_table;
pub(crate) mod lazy_encoder;
mod load;
mod loader;
pub(crate) mod media;
pub(crate) mod media_towers;
mod mobile;
mod names;
mod options;
mod packed;
mod placement;
mod quantize;
mod save;
mod source;
mod tower;
mod vision;

pub use export::options::{ExportForm, ExportOptions};
pub use export::{QuantizedCheckpoint, quantize_checkpoint};
pub(crate) use files::map;
pub use gguf::importance::ImportanceMatrix;
pub use options::{LoadOptions, LoadProgress, Quantization};
pub use save::copy_beside;
pub(crate) use save::{Stored, create, stored, write_file, write_tensors};
