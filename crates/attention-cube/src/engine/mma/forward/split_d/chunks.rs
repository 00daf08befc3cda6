//! Chunks of keys and values on their way through the [ring](crate::engine::mma::ring).
//!
//! A pass multiplies by the chunks of a block of keys, and then by those of the values of the block before it. Before the first block
//! there are no values, and behind the last no keys: their chunks take part in the ring, and are empty.

use crate::engine::mma::forward::copies::{
    Columns, HeadRows, HeadSource, Section, copy_query_columns, copy_section, head_source,
};
use crate::engine::mma::plan::split_d::SplitDTiles;
use crate::engine::mma::ring::{Turn, await_empty, place_of, tell_full};
use crate::fragment::work_tile::{Tile, TileKind};
use cube_kit::hopper::SUBTILE;
use cubecl::prelude::*;

/// What comes through the ring, and where it lies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands {
    pub keys: HeadSource,
    pub values: HeadSource,
    /// Where shared memory starts.
    pub start: u32,
    /// The tile's last block, and one: no block that a pass names is behind it.
    pub end_block: i32,
}

/// The blocks of a pass; `end_block` or behind it where there is none.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Pass {
    /// Whose values are multiplied.
    pub values: i32,
    /// Whose keys are multiplied: the values' of the next pass.
    pub keys: i32,
    /// Whose keys the next pass multiplies.
    pub after: i32,
    /// The turn of its first chunk.
    pub first: Turn,
}

/// Starts to copy the pass's `chunk`-th chunk, or one of the next pass, once all have read what was in its slot. An empty one is full at
/// once.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn fill<E: Float>(
    operands: &Operands,
    query: &Tensor<E>,
    tile: &Tile,
    pass: &Pass,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) {
    let place = place_of(operands.start, &pass.first, chunk, comptime!(tiles.ring()));
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
                SplitDTiles::UNITS,
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
                SplitDTiles::UNITS,
            );
        }
    }
    tell_full(&place);
}

/// Starts to copy the queries' columns of a chunk of keys, behind these.
#[cube]
fn copy_chunk_of_queries<E: Float>(
    query: &Tensor<E>,
    tile: &Tile,
    slot: u32,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
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
            SplitDTiles::UNITS,
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
            SplitDTiles::UNITS,
        );
    }
}

const fn column_section(tiles: SplitDTiles, rows: usize, chunk: usize) -> Section {
    Section {
        rows,
        first_column: chunk * tiles.key_columns,
        subtiles: tiles.chunk_columns(chunk).div_ceil(SUBTILE),
        width: tiles.head_dim,
    }
}

const fn value_section(tiles: SplitDTiles, part: usize) -> Section {
    Section {
        rows: tiles.value_keys,
        first_column: part * tiles.part_columns(),
        subtiles: tiles.part_columns().div_ceil(SUBTILE),
        width: tiles.value_dim,
    }
}
