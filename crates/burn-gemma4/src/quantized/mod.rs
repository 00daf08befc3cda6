//! Weights of a few bits: how files write them, and the numbers that they stand for, bit by bit those of the formats' own programs.

pub(crate) mod blocks;
pub(crate) mod layout;
pub(crate) mod pack;
pub(crate) mod packed;
pub(crate) mod quantize;
pub(crate) mod rows;
mod super_blocks;
