//! Which scores of a tile a unit has: `rows_per_unit × columns_per_unit` of them.

use super::fragments;
use crate::tile::tiles::UnitTiles;
use cubecl::prelude::*;

/// The unit's row among the units of the first product.
#[cube]
pub(crate) fn unit_row(#[comptime] tiles: UnitTiles) -> usize {
    if comptime!(tiles.owns_scores()) {
        fragments::unit_row(tiles)
    } else {
        UNIT_POS as usize / comptime!(tiles.column_units)
    }
}

/// The unit's column among the units of the first product.
#[cube]
pub(crate) fn unit_column(#[comptime] tiles: UnitTiles) -> usize {
    if comptime!(tiles.owns_scores()) {
        fragments::unit_column(tiles)
    } else {
        UNIT_POS as usize % comptime!(tiles.column_units)
    }
}

/// The column of the tile where the `c`-th of a unit's columns lies.
#[cube]
pub(crate) fn tile_column(
    unit_column: usize,
    #[comptime] c: usize,
    #[comptime] tiles: UnitTiles,
) -> usize {
    (unit_column + comptime!(c / 4 * tiles.column_units)) * 4 + comptime!(c % 4)
}

/// The row of the tile where the `k`-th of a unit's rows lies. Where the tile is copied from shared memory,
/// neighbouring units read neighbouring rows; elsewhere rows lie by fours, as columns do.
#[cube]
pub(crate) fn tile_row(
    unit_row: usize,
    #[comptime] k: usize,
    #[comptime] tiles: UnitTiles,
) -> usize {
    if comptime!(tiles.is_direct()) {
        (unit_row + comptime!(k / 4 * tiles.row_units())) * 4 + comptime!(k % 4)
    } else if comptime!(tiles.owns_scores()) {
        unit_row + comptime!(tiles.own_row(k))
    } else {
        unit_row + k * comptime!(tiles.row_units())
    }
}
