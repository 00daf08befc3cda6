//! The copies of chunks of keys and values to the [ring](crate::engine::tensor_core::mma::ring) of slots in shared memory.
//!
//! In a *pass* (main loop iteration), the warps read the chunks of one block's keys, then the chunks of the previous
//! block's values. The first pass has no values, and the last pass has no keys. Each missing chunk still takes a slot,
//! into which nothing is copied.

use crate::engine::tensor_core::common::tile_scheduler::{Tile, TileKind};
use crate::engine::tensor_core::mma::forward::load::{
    Columns, HeadRows, HeadSource, Section, copy_query_columns, copy_section, head_source,
};
use crate::engine::tensor_core::mma::plan::split_d::MmaSplitDTiles;
use crate::engine::tensor_core::mma::ring::{RingTurn, await_empty, ring_slot_of, signal_full};
use cube_kit::nvidia::SUBTILE;
use cubecl::prelude::*;

/// The global-memory addresses of K and V for the tile's head, the address of the CTA's shared memory, and the end of
/// the tile's blocks.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands {
    pub keys: HeadSource,
    pub values: HeadSource,
    /// The address at which the CTA's shared memory starts.
    pub start: u32,
    /// One past the index of the tile's last block.
    pub end_block: i32,
}

/// The blocks of one pass (main loop iteration). If a block index is `end_block` or more, the pass does not have that
/// block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct MainloopStep {
    /// The block whose values this main loop iteration multiplies.
    pub values: i32,
    /// The block whose keys this main loop iteration multiplies. The next iteration multiplies the values of this
    /// block.
    pub keys: i32,
    /// The block whose keys the next main loop iteration multiplies.
    pub after: i32,
    /// The shared-memory slot of this main loop iteration's first chunk, and the parity of the slot's mbarriers.
    pub first: RingTurn,
}

/// Refills a ring slot with the `chunk`-th chunk of a pass (main loop iteration). First waits until all warps have read
/// the chunk that the slot holds. Then starts the copy of the new chunk. If `chunk` is past the last chunk of the pass,
/// the new chunk belongs to the next pass. If the chunk's block does not exist, the function copies nothing, and the
/// slot counts as full.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is decided at compile time, the inner one at run time"
)]
pub(super) fn fill<E: Float>(
    operands: &Operands,
    query: &Tensor<E>,
    tile: &Tile,
    pass: &MainloopStep,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaSplitDTiles,
    #[comptime] kind: TileKind,
) {
    let place = ring_slot_of(operands.start, &pass.first, chunk, comptime!(tiles.ring()));
    await_empty(&place);
    let of_next = comptime!(chunk >= tiles.chunks());
    let index = comptime!(chunk % tiles.chunks());
    if comptime!(index < tiles.key_chunks()) {
        let block = if comptime!(of_next) {
            pass.after
        } else {
            pass.keys
        };
        if block < operands.end_block {
            copy_section(
                operands.keys,
                block * comptime!(tiles.keys as i32),
                place.slot,
                comptime!(column_section(tiles, tiles.keys, index)),
                MmaSplitDTiles::UNITS,
            );
            if comptime!(!tiles.holds_queries) {
                copy_chunk_of_queries::<E>(query, tile, place.slot, index, tiles, kind);
            }
        }
    } else {
        let block = if comptime!(of_next) {
            pass.keys
        } else {
            pass.values
        };
        if block < operands.end_block {
            let own = comptime!(index - tiles.key_chunks());
            let first = comptime!((own / tiles.value_parts * tiles.value_keys) as i32);
            copy_section(
                operands.values,
                block * comptime!(tiles.keys as i32) + first,
                place.slot,
                comptime!(value_section(tiles, own % tiles.value_parts)),
                MmaSplitDTiles::UNITS,
            );
        }
    }
    signal_full(&place);
}

/// Starts the copy of the query columns that belong to one chunk of keys. The kernel multiplies these query columns by
/// the chunk. In the chunk's shared-memory slot, the query columns lie behind the keys.
#[cube]
fn copy_chunk_of_queries<E: Float>(
    query: &Tensor<E>,
    tile: &Tile,
    slot: u32,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaSplitDTiles,
    #[comptime] kind: TileKind,
) {
    let target = slot + comptime!(tiles.chunk_queries_at() as u32);
    if comptime!(kind.heads > 1) {
        let columns = comptime!(Columns {
            first: chunk * tiles.key_columns,
            count: tiles.chunk_columns(chunk),
            width: tiles.head_dim,
        });
        copy_query_columns::<E>(
            query,
            tile,
            target,
            tiles.rows,
            columns,
            MmaSplitDTiles::UNITS,
            kind,
        );
    } else {
        let head = HeadRows {
            batch: tile.batch,
            head: tile.first_head,
            first: 0i32.runtime(),
            end: tile.first_query + tile.rows,
        };
        copy_section(
            head_source::<E>(query, head),
            tile.first_query,
            target,
            comptime!(column_section(tiles, tiles.rows, chunk)),
            MmaSplitDTiles::UNITS,
        );
    }
}

const fn column_section(tiles: MmaSplitDTiles, rows: usize, chunk: usize) -> Section {
    Section {
        rows,
        first_column: chunk * tiles.key_columns,
        subtiles: tiles.chunk_columns(chunk).div_ceil(SUBTILE),
        width: tiles.head_dim,
    }
}

const fn value_section(tiles: MmaSplitDTiles, part: usize) -> Section {
    Section {
        rows: tiles.value_keys,
        first_column: part * tiles.part_columns(),
        subtiles: tiles.part_columns().div_ceil(SUBTILE),
        width: tiles.value_dim,
    }
}
