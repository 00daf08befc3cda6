//! Images in requests: their sources, their limits, and their decoding.

mod options;
mod root;
mod source;
mod store;

pub use options::ImageOptions;
pub(crate) use source::{ImageSource, shown};
pub(crate) use store::{ImageStore, RequestImages, soft_tokens};
