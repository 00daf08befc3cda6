//! The preprocessing of images on the host: decoding, resizing and division into patches. The numbers are those of the
//! image processors of Hugging Face Transformers.

mod decode;
pub(crate) mod image;
pub(crate) mod patches;
pub(crate) mod prepared;
mod resize;
