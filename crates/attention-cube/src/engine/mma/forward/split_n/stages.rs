//! What each warp has of the tile, and how its operands come to it.

use super::scales::ScaleSources;
use crate::engine::mma::forward::copies::{
    Columns, HeadSource, WarpSection, copy_query_columns, copy_warp_section,
};
use crate::engine::mma::plan::split_n::SplitNTiles;
use crate::fragment::work_tile::{Tile, TileKind};
use cube_kit::ampere::copy::{commit_copies, piece_address};
use cube_kit::ampere::words::order_columns;
use cube_kit::hopper::ptx::uniform;
use cube_kit::hopper::wgmma::STEP;
use cubecl::prelude::*;

/// A warp's parts.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Roles {
    pub warp: u32,
    /// Which turn at the blocks of keys its group has, and which of the group's warps it is.
    pub key_group: u32,
    pub column_group: u32,
    /// The first of its columns of queries and keys, and of values.
    pub key_column: u32,
    pub value_column: u32,
    /// Of these columns of values, by 16, the first that it puts together of all groups' outputs.
    pub first_step: u32,
    /// Where its queries lie in shared memory, and its stages.
    pub queries: u32,
    pub stages: u32,
}

/// Of the warp that asks. The cube's shared memory starts at `start`.
#[cube]
pub(super) fn warp_roles(start: u32, #[comptime] tiles: SplitNTiles) -> Roles {
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

/// Starts to copy the tile's queries, by all warps, and ends a group of copies.
#[cube]
pub(super) fn copy_all_queries<E: Float>(
    query: &Tensor<E>,
    tile: &Tile,
    start: u32,
    #[comptime] tiles: SplitNTiles,
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

/// Brings the queries of all warps, which are there, into the order of the codes that they meet.
#[cube]
pub(super) fn order_all_queries(start: u32, #[comptime] tiles: SplitNTiles) {
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

/// The keys and values of the tile's head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands {
    pub keys: HeadSource,
    pub values: HeadSource,
    /// Where these are int8.
    pub scales: ScaleSources,
    /// One past the last block.
    pub end_block: i32,
}

/// Starts to copy a warp's part of a block to a stage, and ends a group of copies for the keys and one for the values, also where there
/// is no such block.
#[cube]
pub(super) fn fill(
    operands: &Operands,
    roles: &Roles,
    block: i32,
    stage: u32,
    #[comptime] tiles: SplitNTiles,
) {
    let keys_at = roles.stages + stage * comptime!(tiles.stage_bytes() as u32);
    let first_row = block * comptime!(tiles.keys as i32);
    if block < operands.end_block {
        copy_warp_section(
            operands.keys,
            first_row,
            in_halves(roles.key_column, tiles),
            keys_at,
            comptime!(section(tiles, tiles.key_columns(), tiles.head_dim)),
        );
    }
    commit_copies();
    if block < operands.end_block {
        copy_warp_section(
            operands.values,
            first_row,
            in_halves(roles.value_column, tiles),
            keys_at + comptime!(tiles.key_bytes() as u32),
            comptime!(section(tiles, tiles.value_columns(), tiles.value_dim)),
        );
    }
    commit_copies();
}

/// So many columns of keys or values, as copies count them.
#[cube]
fn in_halves(columns: u32, #[comptime] tiles: SplitNTiles) -> u32 {
    if comptime!(tiles.reads_words) {
        columns / 2u32
    } else {
        columns
    }
}

/// A warp's columns of a block of an operand of this width.
const fn section(tiles: SplitNTiles, columns: usize, width: usize) -> WarpSection {
    WarpSection {
        rows: tiles.keys,
        columns: tiles.in_halves(columns),
        width: tiles.in_halves(width),
        is_whole: columns * tiles.column_groups == width,
    }
}
