//! The rows and columns of the scores and of the gradients that each warp computes.

use crate::engine::tensor_core::mma::plan::MmaGradientSplitDTiles;
use cube_kit::nvidia::ptx::uniform;
use cubecl::prelude::*;

/// The rows and columns of the scores and of the gradients that a warp computes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Roles {
    pub warp: u32,
    /// The tile row where the warp's scores begin.
    pub score_row: u32,
    /// The index of a 32-column group of the block. The warp computes the scores of this group.
    pub part_group: u32,
    /// The index of the gradient that the warp computes. If the kernel computes dK and dV, the index is 0 for dK and 1 for
    /// dV.
    pub gradient: u32,
    /// The tile row where the warp's gradient rows begin.
    pub sum_row: u32,
    /// The index of the warp among the warps that compute the same gradient rows. These warps divide the gradient's
    /// columns.
    pub column_group: u32,
}

/// Returns the rows and columns of the scores and of the gradients that the calling warp computes.
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
