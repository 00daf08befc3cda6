//! The positions of a plane's fragments in a tile, and of a unit's scores in S.

use super::super::cmma::plane_index;
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// The row and column of a plane's first fragment, counted in fragments.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct PlanePosition {
    pub row: usize,
    pub column: usize,
}

#[cube]
pub(super) fn plane_position(plane: usize, #[comptime] tiles: UnitTiles) -> PlanePosition {
    PlanePosition {
        row: plane % comptime!(tiles.plane_rows()),
        column: plane / comptime!(tiles.plane_rows()),
    }
}

/// Returns the unit's index within its plane.
#[cube]
pub(super) fn lane(#[comptime] tiles: UnitTiles) -> usize {
    let fragments = comptime!(tiles.fragment_tiles());
    if comptime!(fragments.fragments.is_emulated()) {
        UNIT_POS as usize % fragments.plane
    } else {
        UNIT_POS_PLANE as usize
    }
}

/// Synchronizes the units of the plane.
#[cube]
pub(super) fn sync_own_plane(#[comptime] tiles: UnitTiles) {
    if comptime!(tiles.fragment_tiles().fragments.is_emulated()) {
        sync_cube();
    } else {
        sync_plane();
    }
}

/// Returns the first row of S that the unit reads. Every unit must read only scores of its own plane.
#[cube]
pub(in crate::tile_ops) fn unit_row(#[comptime] tiles: UnitTiles) -> usize {
    let [m, n, _] = comptime!(tiles.fragment_shape());
    plane_position(plane_index(tiles), tiles).row * m + lane(tiles) / comptime!(n / 4)
}

/// Returns the position of the first vector of 4 scores that the unit reads in a row of S. The position is counted in
/// vectors. Every unit must read only scores of its own plane.
#[cube]
pub(in crate::tile_ops) fn unit_column(#[comptime] tiles: UnitTiles) -> usize {
    let [_, n, _] = comptime!(tiles.fragment_shape());
    plane_position(plane_index(tiles), tiles).column * comptime!(n / 4)
        + lane(tiles) % comptime!(n / 4)
}
