//! The layout of an accumulator fragment in registers. A thread holds elements of two rows that are 8 apart. In each
//! group of 8 columns, the thread holds two neighboring columns of both rows.

use cubecl::prelude::*;

/// Returns the column of register `index`, relative to the thread's first column.
pub const fn column(index: usize) -> usize {
    index / 4 * 8 + index % 2
}

/// True if register `index` holds an element of the thread's second row.
pub const fn is_second(index: usize) -> bool {
    index / 2 % 2 == 1
}

/// Two f32 numbers of a thread, for example one for each of the thread's two rows.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Pair {
    /// The number for the thread's first row, or for the first of two neighboring columns.
    pub first: f32,
    /// The number for the thread's second row, or for the second of two neighboring columns.
    pub second: f32,
}

/// Builds a pair from its two numbers.
#[cube]
pub fn pair(first: f32, second: f32) -> Pair {
    Pair { first, second }
}
