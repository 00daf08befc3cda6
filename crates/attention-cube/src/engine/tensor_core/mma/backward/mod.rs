//! The backward kernels of the mma engine.

pub(crate) mod bias_gradient;
mod load;
mod part;
pub(crate) mod split_d;
pub(crate) mod split_m;
