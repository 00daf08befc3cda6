//! The preprocessing of images and videos on the host: decoding, sampling of frames, resizing and division into patches.
//! The numbers are those of the image and video processors of Hugging Face Transformers.

mod animation;
mod animation_container;
mod decode;
mod frame_files;
mod frame_times;
pub(crate) mod image;
pub(crate) mod patches;
pub(crate) mod prepared;
pub(crate) mod prepared_video;
mod resize;
mod sampling;
mod unsupported_video;
pub(crate) mod video;
pub(crate) mod video_processor;
mod webp_container;
