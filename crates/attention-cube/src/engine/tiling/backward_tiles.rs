//! The tiles of a backward kernel, for any engine on matrix units.

use crate::math::side::{Side, Sums};

/// The tiles of a backward kernel. A tile of queries streams blocks of keys, and a tile of keys streams blocks of queries.
pub trait BackwardTiles: Copy {
    /// Returns which rows a tile keeps: queries or keys.
    fn side(&self) -> Side;

    /// The number of rows in a tile.
    fn rows(&self) -> usize;

    /// The number of rows in a streamed block. The rows are keys if the tile holds queries, or queries if the tile
    /// holds keys.
    fn columns(&self) -> usize;

    /// The gradients that the kernel accumulates: dQ, dK, dV, or both dK and dV.
    fn sums(&self) -> Sums;

    /// The number of cubes that a multiprocessor runs at once, if one cube may take at most `shared_memory` bytes.
    fn cubes_per_multiprocessor(&self, shared_memory: usize) -> usize;
}
