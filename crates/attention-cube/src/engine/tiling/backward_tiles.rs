//! The tiles of a backward kernel, for any engine on matrix units.

use crate::math::side::{Side, Sums};

/// The tiles of a backward kernel. A tile of queries streams blocks of keys, and a tile of keys streams blocks of queries.
pub trait BackwardTiles: Copy {
    /// Returns whether a tile keeps rows of queries or rows of keys.
    fn side(&self) -> Side;

    /// The number of rows in a tile.
    fn rows(&self) -> usize;

    /// The number of rows in a streamed block. The block's rows are keys if the tile keeps queries, and queries if the
    /// tile keeps keys.
    fn columns(&self) -> usize;

    /// The gradients that the kernel accumulates: dQ, dK, dV, or both dK and dV.
    fn sums(&self) -> Sums;

    /// The number of cubes that a multiprocessor runs at once, if one cube may take at most `shared_memory` bytes.
    fn cubes_per_multiprocessor(&self, shared_memory: usize) -> usize;
}
