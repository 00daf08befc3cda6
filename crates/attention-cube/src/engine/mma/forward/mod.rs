//! The forward's kernels, and how operands come to them.

pub(crate) mod copies;
pub(crate) mod split_d;
pub(crate) mod split_m;
pub(crate) mod split_n;
pub(crate) mod warp;
