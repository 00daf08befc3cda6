//! Layers that vision and audio share.

mod biased;
mod clipped;
mod layer_norm;
mod text_projection;

pub(super) use biased::BiasedLinear;
pub(crate) use clipped::{Clip, ClippedLinear};
pub(super) use layer_norm::LayerNorm;
pub(super) use text_projection::TextProjection;

/// The standard deviation of weights before a checkpoint replaces them.
pub(super) const DEVIATION: f64 = 0.02;
