//! The sections of a row of logits, and the loads of a section. A section is the range of a row's columns that one cube
//! handles. A sort key is an integer that compares as its logit does.

use super::{weight::key, wide::UNITS};
use cubecl::prelude::*;

/// The largest number of sections per row. Every cube reads the results of all sections of its row, so more sections
/// mean more reads.
pub(super) const MOST_STRETCHES: usize = 32;
/// The number of loads that a unit issues before it uses any loaded value.
pub(super) const AHEAD: usize = 8;

/// The shape of the logits, and the number of sections per row.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct LogitsSizes {
    pub rows: u32,
    pub columns: u32,
    /// The number of sections per row. A section is the range of columns that one cube handles.
    pub stretches: u32,
}

/// The section of a row that a cube handles: a range of columns.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Stretch {
    pub row: u32,
    /// The first column of the section. The field `end` is the index after the section's last column.
    pub start: u32,
    pub end: u32,
}

/// Returns the section that this cube handles.
#[cube]
pub(super) fn stretch(columns: u32, stretches: u32) -> Stretch {
    let row = CUBE_POS as u32 / stretches;
    let number = CUBE_POS as u32 % stretches;
    let length = columns.div_ceil(stretches);
    let start = min(number * length, columns);
    Stretch {
        row,
        start,
        end: min(start + length, columns),
    }
}

/// Returns the sort keys of [`AHEAD`] columns of a row. The columns are [`UNITS`] apart, and the row begins at element
/// `from`. A column at or after `end` gives the sort key 0, which is below all other sort keys.
#[cube]
pub(super) fn next_keys<E: Float>(
    logits: &Tensor<E>,
    from: usize,
    column: u32,
    end: u32,
) -> Array<u32> {
    let mut read = Array::<f32>::new(AHEAD);
    #[unroll]
    for ahead in 0..AHEAD {
        let at = min(column + comptime!((ahead * UNITS) as u32), end - 1u32);
        read[ahead] = f32::cast_from(logits[from + at as usize]);
    }
    let mut keys = Array::<u32>::new(AHEAD);
    #[unroll]
    for ahead in 0..AHEAD {
        let at = column + comptime!((ahead * UNITS) as u32);
        keys[ahead] = select(at < end, key(read[ahead]), 0u32);
    }
    keys
}

/// Returns the largest sort key of a row. `largest` holds the largest sort key of each section of the row.
#[cube]
pub(super) fn largest_of(largest: &Tensor<u32>, row: u32, stretches: u32) -> u32 {
    let mut best = 0u32;
    // Issue all loads at once. If the row has fewer sections than loads, repeat the load of the last section's sort
    // key, so that all loads are in bounds.
    #[unroll]
    for number in 0..MOST_STRETCHES {
        let number = min(comptime!(number as u32), stretches - 1u32);
        best = max(best, largest[(row * stretches + number) as usize]);
    }
    best
}
