//! The forward kernels, and the copies of their operands.

pub(crate) mod load;
pub(crate) mod split_d;
pub(crate) mod split_m;
pub(crate) mod split_n;
pub(crate) mod warp;
