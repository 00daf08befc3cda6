//! The backward: a tile of either side, queries or keys, passes over the blocks of the other.

pub(crate) mod copies;
pub(crate) mod split_d;
pub(crate) mod split_m;
