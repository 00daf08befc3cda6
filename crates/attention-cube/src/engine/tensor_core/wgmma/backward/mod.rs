//! The backward kernels. A stationary tile holds rows of one side, queries or keys, and streams the blocks of the other side.

pub(crate) mod load;
pub(crate) mod split_d;
pub(crate) mod split_m;
