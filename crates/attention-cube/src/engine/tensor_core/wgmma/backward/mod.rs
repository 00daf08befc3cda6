//! The backward kernels. A tile of queries streams blocks of keys, and a tile of keys streams blocks of queries.

pub(crate) mod load;
pub(crate) mod split_d;
pub(crate) mod split_m;
