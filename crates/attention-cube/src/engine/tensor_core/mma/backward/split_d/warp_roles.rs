//! The division of the scores and of the gradients among the warps.

use crate::engine::tensor_core::mma::plan::MmaGradientSplitDTiles;
use cube_kit::nvidia::ptx::uniform;
use cubecl::prelude::*;

/// The part of the scores, and the part of the gradients, that one warp computes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Roles {
    pub warp: u32,
    /// The first tile row of the warp's scores.
    pub score_row: u32,
    /// The index of the group of 32 block columns for which the warp computes scores.
    pub part_group: u32,
    /// The index of the gradient that the warp computes. If the kernel computes dK and dV, the index is 0 for dK and 1 for
    /// dV.
    pub gradient: u32,
    /// The first tile row of the warp's part of the gradient.
    pub sum_row: u32,
    /// The index of the warp among the warps that compute the same gradient rows. These warps divide the gradient's
    /// columns.
    pub column_group: u32,
}

/// Returns the parts of the scores and of the gradients that the calling warp computes.
#[cube]
pub(super) fn assign_roles(#[comptime] tiles: MmaGradientSplitDTiles) -> Roles {
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
            * comptime!(MmaGradientSplitDTiles::SUM_ROWS as u32),
        column_group: warp % column_groups,
    }
}
