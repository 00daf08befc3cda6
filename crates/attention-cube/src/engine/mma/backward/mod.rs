//! The backward's kernels.

pub(crate) mod bias_gradient;
mod copies;
mod part;
pub(crate) mod split_d;
pub(crate) mod split_m;
