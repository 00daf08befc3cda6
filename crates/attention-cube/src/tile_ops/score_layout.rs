//! The assignment of a tile's scores to units. Each unit has `rows_per_unit × columns_per_unit` scores.

use super::fragments::planes;
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// Returns the unit's row index in S (the first product `S = A Bᵀ`). From this index, `tile_row` computes the rows of
/// the unit's scores.
#[cube]
pub(crate) fn unit_row(#[comptime] tiles: UnitTiles) -> usize {
    if comptime!(tiles.owns_scores()) {
        planes::unit_row(tiles)
    } else {
        UNIT_POS as usize / comptime!(tiles.column_units)
    }
}

/// Returns the unit's column index in S (the first product `S = A Bᵀ`). From this index, `tile_column` computes the
/// columns of the unit's scores.
#[cube]
pub(crate) fn unit_column(#[comptime] tiles: UnitTiles) -> usize {
    if comptime!(tiles.owns_scores()) {
        planes::unit_column(tiles)
    } else {
        UNIT_POS as usize % comptime!(tiles.column_units)
    }
}

/// Returns the index, within the tile, of one of the columns in which a unit has scores. `c` is the index of this
/// column among the unit's own columns.
#[cube]
pub(crate) fn tile_column(
    unit_column: usize,
    #[comptime] c: usize,
    #[comptime] tiles: UnitTiles,
) -> usize {
    (unit_column + comptime!(c / 4 * tiles.column_units)) * 4 + comptime!(c % 4)
}

/// Returns the index, within the tile, of one of the rows in which a unit has scores. `k` is the index of this row
/// among the unit's own rows.
///
/// If units multiply operands from shared memory, neighboring units have neighboring rows. If units multiply operands
/// from global memory, each unit has groups of four neighboring rows.
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
