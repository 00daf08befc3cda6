//! The backward's kernels.

mod copies;
mod part;
pub(crate) mod split_d;
pub(crate) mod split_m;
