//! The division of the scores (by rows and keys) and of the output (by rows and columns) among the warps.

use crate::engine::tensor_core::mma::plan::split_d::MmaSplitDTiles;
use cube_kit::nvidia::ptx::uniform;
use cubecl::prelude::*;

/// The rows and keys of the scores, and the rows and columns of the output, that one warp computes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Roles {
    pub warp: u32,
    /// The first tile row of the warp's scores.
    pub score_row: u32,
    /// The index of the group of 32 block keys for which the warp computes scores.
    pub key_group: u32,
    /// The first tile row of the warp's output.
    pub output_row: u32,
    /// The index of the warp in its row group. The warps of a row group compute different columns of the same output
    /// rows.
    pub column_group: u32,
    /// The index of the warp's row group. The warps of a row group compute the output of the same rows, and also the
    /// scores of these rows. A warp therefore waits only for warps of its own row group.
    pub row_group: u32,
}

/// Returns the rows, keys and columns of the scores and of the output that the calling warp computes.
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
