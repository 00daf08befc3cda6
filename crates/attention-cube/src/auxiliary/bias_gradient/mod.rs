//! Kernels that compute the bias gradient in f32 without tensor cores, for the backward of any engine.

pub(crate) mod rows;
pub(crate) mod scores;
