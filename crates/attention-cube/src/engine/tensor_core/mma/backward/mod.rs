//! The backward kernels.

pub(crate) mod bias_gradient;
mod load;
mod part;
pub(crate) mod split_d;
pub(crate) mod split_m;
