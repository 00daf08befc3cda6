//! The forward: a tile of queries passes over the blocks of keys that it sees.

pub(crate) mod copies;
mod scheduler;
pub(crate) mod split_d;
pub(crate) mod split_m;
