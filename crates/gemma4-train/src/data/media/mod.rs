//! Images and audio clips of examples: their parts in messages, their files, and their preparation for batches.

mod medium;
mod part;
mod prepare;
mod source;

pub use medium::{ExampleMedium, Medium};
pub(crate) use part::{MediaPart, take_parts};
pub(crate) use prepare::BatchPreparation;
pub(crate) use source::Origin;
