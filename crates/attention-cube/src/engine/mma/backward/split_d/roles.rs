//! What each warp has of the scores and of the gradients.

use crate::engine::mma::plan::GradientSplitDTiles;
use cube_kit::hopper::ptx::uniform;
use cubecl::prelude::*;

/// A warp's parts.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Roles {
    pub warp: u32,
    /// The first row of its scores, and which 32 of a block's columns.
    pub score_row: u32,
    pub part_group: u32,
    /// Which gradient it sums, of its first row, and its turn at the columns.
    pub gradient: u32,
    pub sum_row: u32,
    pub column_group: u32,
}

/// Of the warp that asks.
#[cube]
pub(super) fn warp_roles(#[comptime] tiles: GradientSplitDTiles) -> Roles {
    let warp = uniform(UNIT_POS / 32u32);
    let part_groups = comptime!(tiles.part_groups() as u32);
    let column_groups = comptime!(tiles.column_groups() as u32);
    let row_groups = comptime!(tiles.row_groups() as u32);
    Roles {
        warp,
        score_row: warp / part_groups * comptime!(tiles.score_rows() as u32),
        part_group: warp % part_groups,
        gradient: warp / comptime!(column_groups * row_groups),
        sum_row: warp / column_groups % row_groups
            * comptime!(GradientSplitDTiles::SUM_ROWS as u32),
        column_group: warp % column_groups,
    }
}
