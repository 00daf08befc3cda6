//! The forward kernels. Each tile of queries streams the blocks of keys and values that it sees.

pub(crate) mod load;
pub(crate) mod pages;
mod scheduler;
pub(crate) mod split_d;
pub(crate) mod split_m;
