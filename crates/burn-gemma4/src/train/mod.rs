//! Training: losses, gradients, packing and graph capture for a differentiable model.

mod checkpointing;
pub(crate) mod graph_capture;
pub(crate) mod media;
pub(crate) mod packing;

pub(crate) mod gradients;
mod loss;
