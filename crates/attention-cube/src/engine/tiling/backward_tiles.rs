//! The tiles of a backward kernel, for any engine on matrix units.

use crate::math::side::{Side, Sums};

/// The tiles of a backward kernel. A tile keeps rows of queries or keys, and the kernel streams blocks of the opposite side.
pub trait BackwardTiles: Copy {
    /// Returns the side of the rows that a tile keeps: queries or keys.
    fn side(&self) -> Side;

    /// The number of rows in a tile.
    fn rows(&self) -> usize;

    /// The number of rows in a streamed block of the opposite side.
    fn columns(&self) -> usize;

    /// The gradients that the kernel accumulates: dQ, or dK and dV.
    fn sums(&self) -> Sums;

    /// The number of cubes that a multiprocessor runs at once, if one cube may take at most `shared_memory` bytes.
    fn cubes_per_multiprocessor(&self, shared_memory: usize) -> usize;
}
