//! Which blocks a tile visits: those of its run in which it may see something, by segments and mask.

use super::scoring::Masking;
use super::work_tile::{Tile, TileKind};
use crate::math::side::Side;
use crate::math::visibility::{Run, segments_meet};
use crate::passes::mask_bits::kernel::{NOTHING, sight_of_block};
use cubecl::prelude::*;

/// Where a tile stands among the blocks of the other side.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct TilePosition {
    pub batch: u32,
    pub head: u32,
    /// The number of the tile among the blocks that segments are bounded by.
    pub row_block: u32,
    pub run: Run,
}

/// Where a tile of queries stands.
#[cube]
pub(crate) fn tile_position(tile: &Tile) -> TilePosition {
    TilePosition {
        batch: tile.batch,
        head: tile.first_head,
        row_block: tile.query_block,
        run: tile.keys,
    }
}

/// The first block from `block` on that the tile visits, or `end_block`.
#[cube]
pub(crate) fn next_block(
    tile: &Tile,
    block: i32,
    masking: &Masking,
    #[comptime] kind: TileKind,
) -> i32 {
    next_block_in_steps(tile, block, masking, 1usize, kind)
}

/// The first of `block` and every `step`-th after it that the tile visits, or one from `end_block` on.
#[cube]
pub(crate) fn next_block_in_steps(
    tile: &Tile,
    block: i32,
    masking: &Masking,
    #[comptime] step: usize,
    #[comptime] kind: TileKind,
) -> i32 {
    let mut block = block;
    if comptime!(kind.fragment.structure.segments || kind.sums_up_mask()) {
        let tile_position = tile_position(tile);
        let mut searching = block < tile.end_block;
        while searching {
            if meets(&tile_position, block, masking, kind) {
                searching = false;
            } else {
                block += comptime!(step as i32);
                searching = block < tile.end_block;
            }
        }
    }
    block
}

/// Whether the tile may see something of a block in its run, by segments and mask.
#[cube]
pub(crate) fn meets(
    tile_position: &TilePosition,
    block: i32,
    masking: &Masking,
    #[comptime] kind: TileKind,
) -> bool {
    let structure = comptime!(kind.fragment.structure);
    let blocks = block_pair(tile_position, block, kind.fragment.side);
    let mut meets = segments_meet(
        &masking.extent,
        &masking.lengths_and_ids,
        tile_position.batch,
        blocks.query,
        blocks.key,
        structure,
    );
    if comptime!(kind.sums_up_mask()) {
        meets = meets && mask_sight(tile_position, block, masking) != NOTHING;
    }
    meets
}

/// A block of queries and one of keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct BlockPair {
    query: u32,
    key: u32,
}

/// The tile and a block, each by its number on its side.
#[cube]
fn block_pair(tile_position: &TilePosition, block: i32, #[comptime] side: Side) -> BlockPair {
    if comptime!(side == Side::Queries) {
        BlockPair {
            query: tile_position.row_block,
            key: block as u32,
        }
    } else {
        BlockPair {
            query: block as u32,
            key: tile_position.row_block,
        }
    }
}

/// What the mask lets the tile see of a block.
#[cube]
pub(super) fn mask_sight(tile_position: &TilePosition, block: i32, masking: &Masking) -> u32 {
    sight_of_block(
        &masking.mask,
        &masking.mask_places,
        tile_position.batch,
        tile_position.head,
        tile_position.row_block,
        block as u32,
    )
}
