//! What each warp has of the scores and of the output.

use crate::engine::mma::plan::split_d::SplitDTiles;
use cube_kit::hopper::ptx::uniform;
use cubecl::prelude::*;

/// A warp's parts.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Roles {
    pub warp: u32,
    /// The first row of its scores, and which 32 of a block's keys.
    pub score_row: u32,
    pub key_group: u32,
    /// The first row of its output, and its turn at the columns.
    pub output_row: u32,
    pub column_group: u32,
    /// Which rows of the output these are. The warps of a row group have the scores of the same rows, too, and meet among themselves.
    pub row_group: u32,
}

/// Of the warp that asks.
#[cube]
pub(super) fn warp_roles(#[comptime] tiles: SplitDTiles) -> Roles {
    let warp = uniform(UNIT_POS / 32u32);
    let key_groups = comptime!(tiles.key_groups() as u32);
    let column_groups = comptime!(tiles.column_groups() as u32);
    Roles {
        warp,
        score_row: warp / key_groups * comptime!(tiles.score_rows() as u32),
        key_group: warp % key_groups,
        output_row: warp / column_groups * comptime!(tiles.output_rows() as u32),
        column_group: warp % column_groups,
        row_group: warp / column_groups,
    }
}
