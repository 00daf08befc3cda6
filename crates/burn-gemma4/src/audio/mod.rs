//! The preprocessing of audio on the host: decoding, resampling and features. The features are those of the feature
//! extractors of Hugging Face Transformers.

pub(crate) mod clip;
mod container;
mod decode;
pub(crate) mod features;
pub(crate) mod header;
mod log_mel;
mod mel;
mod ogg;
pub(crate) mod prepared;
mod resample;
