//! The keys and columns of a tile that each warp processes, and the copies of the operands to the warp's stages. A stage
//! holds one block of keys and values in shared memory. A key group is the one or two warps that process the same blocks.

use super::pages::{PageSources, paged_head};
use super::scales::ScaleSources;
use crate::engine::tensor_core::common::tile_scheduler::{Tile, TileKind};
use crate::engine::tensor_core::mma::forward::load::{
    Columns, HeadSource, WarpSection, copy_query_columns, copy_warp_section,
};
use crate::engine::tensor_core::mma::plan::split_n::MmaSplitNTiles;
use cube_kit::ampere::code_operand::order_columns;
use cube_kit::ampere::cp_async::{commit_copies, piece_address};
use cube_kit::hopper::wgmma::STEP;
use cube_kit::nvidia::ptx::uniform;
use cubecl::prelude::*;

/// The keys and columns that a warp processes, and its addresses in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Roles {
    pub warp: u32,
    /// The index of the warp's key group. Different key groups process different blocks of keys.
    pub key_group: u32,
    /// The index of the warp in its key group. The warps of a key group process different columns of the same blocks.
    pub column_group: u32,
    /// The first column of Q and K that the warp multiplies. The warp multiplies the same columns of both.
    pub key_column: u32,
    /// The first column of V that the warp multiplies, which is also the first output column that the warp computes.
    pub value_column: u32,
    /// The first of the output's 16-column steps that the warp merges at the end. For each of its steps, the warp adds
    /// the outputs of all key groups.
    pub first_step: u32,
    /// The address of the warp's query columns in shared memory.
    pub queries: u32,
    /// The address of the warp's stages (buffers for blocks of keys and values) in shared memory.
    pub stages: u32,
}

/// Returns the keys, the columns and the shared-memory addresses of the calling warp. The CTA's shared memory starts at
/// `start`.
#[cube]
pub(super) fn warp_roles(start: u32, #[comptime] tiles: MmaSplitNTiles) -> Roles {
    let warp = uniform(UNIT_POS / 32u32);
    let groups = comptime!(tiles.column_groups as u32);
    let key_group = warp / groups;
    let column_group = warp % groups;
    Roles {
        warp,
        key_group,
        column_group,
        key_column: column_group * comptime!(tiles.key_columns() as u32),
        value_column: column_group * comptime!(tiles.value_columns() as u32),
        first_step: key_group * comptime!(tiles.part_steps() as u32),
        queries: start + column_group * comptime!(tiles.query_bytes() as u32),
        stages: start
            + comptime!(tiles.stages_at() as u32)
            + warp * comptime!(tiles.warp_bytes() as u32),
    }
}

/// Starts the copy of the tile's queries. All warps of the CTA take part in this copy. The function commits the copy as
/// one `cp.async` group.
#[cube]
pub(super) fn copy_all_queries<E: Float>(
    query: &Tensor<E>,
    tile: &Tile,
    start: u32,
    #[comptime] tiles: MmaSplitNTiles,
    #[comptime] kind: TileKind,
) {
    #[unroll]
    for group in 0..tiles.column_groups {
        copy_query_columns::<E>(
            query,
            tile,
            start + comptime!((group * tiles.query_bytes()) as u32),
            comptime!(tiles.rows()),
            comptime!(Columns {
                first: group * tiles.key_columns(),
                count: tiles.key_columns(),
                width: tiles.head_dim,
            }),
            comptime!(tiles.units()),
            kind,
        );
    }
    commit_copies();
}

/// Reorders the columns of all queries for the GEMM that multiplies queries by codes. In the new order, the columns
/// match the order in which lanes hold codes. Before the call, the copies of the queries must have completed.
#[cube]
pub(super) fn order_all_queries(start: u32, #[comptime] tiles: MmaSplitNTiles) {
    let steps = comptime!(tiles.key_columns() / STEP);
    let of_group = comptime!((tiles.rows() * steps) as u32);
    let mut index = UNIT_POS;
    while index < comptime!(tiles.column_groups as u32) * of_group {
        let group = index / of_group;
        let step = index % of_group / comptime!(tiles.rows() as u32);
        let row = index % comptime!(tiles.rows() as u32);
        let at = start + group * comptime!(tiles.query_bytes() as u32);
        order_columns(piece_address(at, row, 2u32 * step, tiles.rows()));
        index += comptime!(tiles.units() as u32);
    }
}

/// The addresses of the keys and values of the tile's KV head, their scales and pages, and the index at which the
/// tile's blocks end.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands {
    pub keys: HeadSource,
    pub values: HeadSource,
    /// The scales of keys and values, which are used only for codes.
    pub scales: ScaleSources,
    /// The pages of the tile's sequence, which are used only if keys and values lie in pages.
    pub pages: PageSources,
    /// One past the index of the tile's last block.
    pub end_block: i32,
}

/// Starts the copy of a block to a stage (the shared-memory buffer of one block). The function copies only the columns
/// of the block that this warp processes. It commits one `cp.async` group for the keys and one for the values. If the
/// block does not exist, both groups are empty. If keys and values lie in pages, `page` is the block's page.
#[cube]
pub(super) fn fill(
    operands: &Operands,
    roles: &Roles,
    block: i32,
    page: u32,
    stage: u32,
    #[comptime] tiles: MmaSplitNTiles,
    #[comptime] kind: TileKind,
) {
    let keys_at = roles.stages + stage * comptime!(tiles.stage_bytes() as u32);
    let first_row = block * comptime!(tiles.keys as i32);
    if block < operands.end_block {
        copy_warp_section(
            paged_head(
                operands.keys,
                operands.pages.key_bytes,
                page,
                first_row,
                kind,
            ),
            first_row,
            in_halves(roles.key_column, tiles),
            keys_at,
            comptime!(section(tiles, tiles.key_columns(), tiles.head_dim)),
        );
    }
    commit_copies();
    if block < operands.end_block {
        copy_warp_section(
            paged_head(
                operands.values,
                operands.pages.value_bytes,
                page,
                first_row,
                kind,
            ),
            first_row,
            in_halves(roles.value_column, tiles),
            keys_at + comptime!(tiles.key_bytes() as u32),
            comptime!(section(tiles, tiles.value_columns(), tiles.value_dim)),
        );
    }
    commit_copies();
}

/// Converts a number of columns to a number of 16-bit elements, the unit of the copies. Two codes fill one element.
#[cube]
fn in_halves(columns: u32, #[comptime] tiles: MmaSplitNTiles) -> u32 {
    if comptime!(tiles.codes.is_some()) {
        columns / 2u32
    } else {
        columns
    }
}

/// Returns the sizes of the section of an operand block that one warp copies. The section has `columns` of the
/// operand's `width` columns.
const fn section(tiles: MmaSplitNTiles, columns: usize, width: usize) -> WarpSection {
    WarpSection {
        rows: tiles.keys,
        columns: tiles.in_halves(columns),
        width: tiles.in_halves(width),
        is_whole: columns * tiles.column_groups == width,
    }
}
