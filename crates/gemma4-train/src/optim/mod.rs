//! Optimizers that compute in f32, and the processing of gradients before an update.

pub(crate) mod factor;
pub(crate) mod gradients;
pub(crate) mod loss_scale;
pub mod master_weights;
pub mod optimizer;
pub mod skipped_steps;
