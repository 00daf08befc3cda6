//! The backward's kernels.

pub(crate) mod split_m;
