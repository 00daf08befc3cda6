//! Where the numbers of an accumulator's fragments are: a thread has two rows, 8 apart, and of every 8 columns two neighbours.

use cubecl::prelude::*;

/// Column of register `index`, from the fragment's first.
pub const fn column(index: usize) -> usize {
    index / 4 * 8 + index % 2
}

/// Whether register `index` is of the second row.
pub const fn is_second(index: usize) -> bool {
    index / 2 % 2 == 1
}

/// Two numbers of a thread's rows.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Pair {
    /// Of the first row.
    pub first: f32,
    /// Of the second row, or of the next column.
    pub second: f32,
}

/// The pair of two numbers.
#[cube]
pub fn pair(first: f32, second: f32) -> Pair {
    Pair { first, second }
}
