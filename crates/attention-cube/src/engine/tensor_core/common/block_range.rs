//! Finds the blocks that a tile must process. These are all blocks in the tile's visible range, except blocks that
//! segments, key intervals or mask hide from all rows. The visible range holds the keys (or queries) that window and
//! sequence length leave visible to at least one row of the tile.

use super::scoring::Masking;
use super::tile_scheduler::{Tile, TileKind};
use crate::auxiliary::mask_bits::kernel::{NOTHING, summary_of_block};
use crate::math::side::Side;
use crate::math::visibility::{Run, blocks_meet};
use cubecl::prelude::*;

/// A tile's visible range, and the tile's indices in the table of segment bounds and in the mask. The range holds keys for a
/// tile of queries, and queries for a tile of keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct TilePosition {
    pub batch: u32,
    pub head: u32,
    /// The tile's index in the table of segment bounds. The table has one entry for each block of queries and for each block
    /// of keys.
    pub row_block: u32,
    pub run: Run,
}

/// Returns the [`TilePosition`] of a tile of queries.
#[cube]
pub(crate) fn tile_position(tile: &Tile) -> TilePosition {
    TilePosition {
        batch: tile.batch,
        head: tile.first_head,
        row_block: tile.query_block,
        run: tile.keys,
    }
}

/// Returns the first block at or after `block` that the tile must process, or `end_block` if no block is left.
#[cube]
pub(crate) fn next_block(
    tile: &Tile,
    block: i32,
    masking: &Masking,
    #[comptime] kind: TileKind,
) -> i32 {
    next_block_in_steps(tile, block, masking, 1usize, kind)
}

/// Returns the first of the blocks `block`, `block + step`, `block + 2 · step`, … that the tile must process. If no
/// block is left, the result is at least `end_block`.
#[cube]
pub(crate) fn next_block_in_steps(
    tile: &Tile,
    block: i32,
    masking: &Masking,
    #[comptime] step: usize,
    #[comptime] kind: TileKind,
) -> i32 {
    let mut block = block;
    if comptime!(kind.skips_blocks()) {
        let tile_position = tile_position(tile);
        let mut searching = block < tile.end_block;
        while searching {
            if may_intersect(&tile_position, block, masking, kind) {
                searching = false;
            } else {
                block += comptime!(step as i32);
                searching = block < tile.end_block;
            }
        }
    }
    block
}

/// True if segments, key intervals and mask may leave a part of the block visible to the tile. The block must lie in the
/// tile's visible range.
#[cube]
pub(crate) fn may_intersect(
    tile_position: &TilePosition,
    block: i32,
    masking: &Masking,
    #[comptime] kind: TileKind,
) -> bool {
    let structure = comptime!(kind.fragment.structure);
    let blocks = block_pair(tile_position, block, kind.fragment.side);
    let mut may_intersect = blocks_meet(
        &masking.seq_lens,
        &masking.lengths_and_ids,
        tile_position.batch,
        blocks.query,
        blocks.key,
        structure,
    );
    if comptime!(kind.sums_up_mask()) {
        may_intersect = may_intersect && mask_summary(tile_position, block, masking) != NOTHING;
    }
    may_intersect
}

/// The index of a block of queries, and the index of a block of keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct BlockPair {
    pub query: u32,
    pub key: u32,
}

/// Returns the indices of the query block and the key block, for a tile and one of the blocks that it streams. If
/// `side` is queries, the tile is the query block. If `side` is keys, the tile is the key block.
#[cube]
pub(super) fn block_pair(
    tile_position: &TilePosition,
    block: i32,
    #[comptime] side: Side,
) -> BlockPair {
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

/// Returns the mask's summary for a tile and a block. See [`summary_of_block`].
#[cube]
pub(super) fn mask_summary(tile_position: &TilePosition, block: i32, masking: &Masking) -> u32 {
    summary_of_block(
        &masking.mask,
        &masking.mask_offsets,
        tile_position.batch,
        tile_position.head,
        tile_position.row_block,
        block as u32,
    )
}
