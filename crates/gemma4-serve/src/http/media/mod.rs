//! Images and audio in requests: their sources, their limits, and their decoding.

mod kind;
mod options;
mod request;
mod root;
mod source;
mod store;

pub(crate) use kind::{Kind, soft_tokens};
pub use options::{AudioOptions, ImageOptions, MediaOptions};
pub(crate) use request::RequestMedia;
pub(crate) use source::{MediaSource, shown};
pub(crate) use store::MediaStore;
