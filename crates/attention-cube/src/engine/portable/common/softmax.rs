//! The online softmax (Milakov and Gimelshein, 2018) over a tile in which several units share each row. The units share
//! data only through shared memory, without plane operations.
//!
//! Shared memory holds each row's running maximum, and the factor that rescales earlier results when the maximum grows.
//! For each row, one unit updates both values. Each unit sums the exponentials of its own columns, and the units add up
//! their sums at the end.
//!
//! If planes hold the output in fragments, a rescale of the output has to pass through shared memory. To make rescales
//! rare, the softmax then subtracts a reference maximum instead of the running maximum. The reference maximum changes
//! only if the running maximum exceeds the reference maximum by more than ln(2^8). The exponentials are then at most
//! 2^8, far from the limits of half precision.

use crate::math::score::{LOWEST, is_hidden, numerator};
use crate::tile_ops::score_layout::{tile_row, unit_column, unit_row};
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// The largest difference between the true maximum of a row and the row's reference maximum, which the softmax
/// subtracts. A larger difference forces a rescale. The value is ln(2^8).
const HELD: f32 = 5.545_177;

/// The maxima, factors and sums of a tile's rows, which all units of a cube share.
#[derive(CubeType)]
pub(crate) struct RowStatistics {
    /// The partial maxima or sums of the units. Each row has `column_units` floats and one unused float. The unused
    /// float avoids bank conflicts.
    pub partial: Shared<[f32]>,
    /// The running maximum of each row. If planes hold the output in fragments, this field holds reference maxima
    /// instead. A reference changes only if the true maximum exceeds the reference by more than ln(2^8).
    pub maximum: Shared<[f32]>,
    /// For each row, the factor that rescales earlier results. At the end, the field holds the factors that normalize
    /// the output.
    pub factor: Shared<[f32]>,
    /// One flag per group of rows, used only if planes hold the output in fragments. The flag is 1 if at least one row
    /// of the group has a factor other than 1. The output then needs a rescale.
    pub moved: Shared<[u32]>,
    /// A flag that is 1 if the unit's row had a visible key in an earlier block. Only kernels whose planes hold the
    /// output in fragments use the flag. The running maximum cannot replace the flag, because the initial maximum is
    /// the lowest f32, which is also a valid score.
    pub seen: Array<u32>,
}

/// Creates the row statistics before the first block of keys. Other units may read the statistics after the next sync.
#[cube]
pub(crate) fn row_statistics(#[comptime] tiles: UnitTiles) -> RowStatistics {
    let mut statistics = RowStatistics {
        partial: Shared::new_slice(comptime!(tiles.partial_floats())),
        maximum: Shared::new_slice(tiles.rows),
        factor: Shared::new_slice(tiles.rows),
        moved: Shared::new_slice(comptime!(tiles.row_groups())),
        seen: Array::new(1usize),
    };
    statistics.seen[0] = 0u32;
    if UNIT_POS < comptime!(tiles.rows as u32) {
        statistics.maximum[UNIT_POS as usize] = f32::new(LOWEST);
    }
    statistics
}

/// Turns a block's scores `s` into exponentials, adds them to the unit's `sums`, and updates the row statistics. The
/// function itself rescales the earlier `sums`. The caller must rescale the earlier output by the factors in
/// `statistics.factor`. The function syncs the cube, so that units may then read the statistics of all rows.
#[cube]
pub(crate) fn advance(
    s: &mut Array<f32>,
    sums: &mut Array<f32>,
    statistics: &mut RowStatistics,
    #[comptime] tiles: UnitTiles,
) {
    let unit_row = unit_row(tiles);
    let unit_column = unit_column(tiles);
    let pitch = comptime!(tiles.partial_pitch());
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let mut largest = f32::new(LOWEST);
        #[unroll]
        for quad in 0..tiles.column_vectors {
            let at = comptime!(k * tiles.columns_per_unit() + 4 * quad);
            let of_quad = max(max(s[at], s[at + 1]), max(s[at + 2], s[at + 3]));
            if comptime!(quad == 0) {
                largest = of_quad;
            } else {
                largest = max(largest, of_quad);
            }
        }
        let row = tile_row(unit_row, k, tiles);
        statistics.partial[row * pitch + unit_column] = largest;
    }
    sync_cube();
    if UNIT_POS < comptime!(tiles.rows as u32) {
        let row = UNIT_POS as usize;
        let before = statistics.maximum[row];
        let mut of_block = statistics.partial[row * pitch];
        #[unroll]
        for x in 1..tiles.column_units {
            of_block = max(of_block, statistics.partial[row * pitch + x]);
        }
        let largest = max(before, of_block);
        if comptime!(tiles.has_fragments()) {
            let outgrown = largest > before + HELD;
            let reference = select(outgrown, largest, before);
            statistics.maximum[row] = reference;
            // Rescale only if the row had a visible key in an earlier block. Otherwise there are no earlier results to
            // rescale.
            let has_older = outgrown && statistics.seen[0] != 0u32;
            statistics.factor[row] = select(has_older, (before - reference).exp(), 1.0f32);
            if !is_hidden(of_block) {
                statistics.seen[0] = 1u32;
            }
        } else {
            statistics.maximum[row] = largest;
            statistics.factor[row] = (before - largest).exp();
        }
    }
    sync_cube();
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let row = tile_row(unit_row, k, tiles);
        let reference = statistics.maximum[row];
        let mut sum = sums[k] * statistics.factor[row];
        #[unroll]
        for c in 0..comptime!(tiles.columns_per_unit()) {
            let p = numerator(s[comptime!(k * tiles.columns_per_unit() + c)], reference);
            s[comptime!(k * tiles.columns_per_unit() + c)] = p;
            sum += p;
        }
        sums[k] = sum;
    }
}

/// Sets the flag of each group of rows with a factor other than 1. Other units may read the flags after the next sync.
#[cube]
pub(crate) fn signal_rescale(statistics: &mut RowStatistics, #[comptime] tiles: UnitTiles) {
    if UNIT_POS < comptime!(tiles.row_groups() as u32) {
        let mut any = 0u32;
        #[unroll]
        for row in 0..comptime!(tiles.group_rows()) {
            if statistics.factor[UNIT_POS as usize * comptime!(tiles.group_rows()) + row] != 1.0f32
            {
                any = 1u32;
            }
        }
        statistics.moved[UNIT_POS as usize] = any;
    }
}

/// Adds up the partial row sums of all units. Unit `i` returns the sum of row `i`, and units without a row return 0.
#[cube]
pub(crate) fn total(
    sums: &Array<f32>,
    statistics: &mut RowStatistics,
    #[comptime] tiles: UnitTiles,
) -> f32 {
    let unit_row = unit_row(tiles);
    let unit_column = unit_column(tiles);
    let pitch = comptime!(tiles.partial_pitch());
    sync_cube();
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let row = tile_row(unit_row, k, tiles);
        statistics.partial[row * pitch + unit_column] = sums[k];
    }
    sync_cube();
    let mut total = 0.0f32;
    if UNIT_POS < comptime!(tiles.rows as u32) {
        #[unroll]
        for x in 0..tiles.column_units {
            total += statistics.partial[UNIT_POS as usize * pitch + x];
        }
    }
    total
}
