//! The rows, keys and columns of the scores and of the output that each warp computes.

use crate::engine::tensor_core::mma::plan::split_d::MmaSplitDTiles;
use cube_kit::nvidia::ptx::uniform;
use cubecl::prelude::*;

/// The rows, keys and columns that a warp computes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Roles {
    pub warp: u32,
    /// The tile row where the warp's scores begin.
    pub score_row: u32,
    /// The index of a 32-key group of the block. The warp computes the scores of this group.
    pub key_group: u32,
    /// The tile row where the warp's output begins.
    pub output_row: u32,
    /// The index of the warp in its row group. The warps of a row group divide the output's columns.
    pub column_group: u32,
    /// The index of the warp's row group. The warps of a row group share output rows and compute the scores of these rows,
    /// so warps synchronize only inside their row group.
    pub row_group: u32,
}

/// Returns the rows, keys and columns that the calling warp computes.
#[cube]
pub(super) fn assign_roles(#[comptime] tiles: MmaSplitDTiles) -> Roles {
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
