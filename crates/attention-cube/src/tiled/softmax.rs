//! The online softmax (Milakov and Gimelshein, 2018) over a tile whose rows are spread over units, with
//! shared memory alone.
//!
//! A row's running maximum and the factor that brings older results to it live in shared memory and are
//! updated by one unit a row; each unit sums the numerators of its own columns and the sums meet at the end.
//!
//! Where planes have the output in fragments, which only by way of shared memory are multiplied by the rows' factors, a row's reference is
//! held: it moves to the maximum only when that has outgrown it by 2^8. P stays below 2^8 then, far from the limits of half precision.

use crate::math::score::{LOWEST, is_hidden, numerator};
use crate::tile::score_places::{tile_row, unit_column, unit_row};
use crate::tile::tiles::UnitTiles;
use cubecl::prelude::*;

/// What a maximum may outgrow a held reference by: 8 powers of two.
const HELD: f32 = 5.545_177;

/// What units share about the rows.
#[derive(CubeType)]
pub(crate) struct RowStatistics {
    /// Partial maxima or sums: `column_units` a row, one float apart from the next row's.
    pub partial: Shared<[f32]>,
    /// Running maximum of each row, or the reference that is held for it.
    pub maximum: Shared<[f32]>,
    /// The factor on older results after a block; at the end, on the output.
    pub factor: Shared<[f32]>,
    /// Whether the older results of any row of a group have to be multiplied by another factor than 1, where references are held.
    pub moved: Shared<[u32]>,
    /// Whether the unit's row has seen a score, where references are held. The maximum does not tell: the lowest number is a score, too.
    pub seen: Array<u32>,
}

/// Statistics of rows that have seen no score. A sync makes them visible.
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

/// Turns a block's scores into numerators and updates the statistics. Syncs; afterwards `factor` holds
/// for the older results.
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
            // Before the first score there is nothing to multiply.
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

/// Tells which groups of rows have a factor other than 1, where references are held. A sync makes it visible.
#[cube]
pub(crate) fn tell_moved(statistics: &mut RowStatistics, #[comptime] tiles: UnitTiles) {
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

/// Adds the units' sums up. Afterwards the unit that owns row `UNIT_POS` returns its sum; others 0.
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
