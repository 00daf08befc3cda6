//! Chunks of keys and values on their way through the ring.
//!
//! A pass multiplies by the chunks of a block of keys, and then by those of the values of the block before it. Before the first block
//! there are no values, and behind the last no keys: their chunks take part in the ring, and are empty.

use crate::engine::mma::forward::copies::{HeadSource, Section, copy_section};
use crate::engine::mma::plan::split_d::SplitDTiles;
use cube_kit::ampere::copy::commit_copies;
use cube_kit::hopper::SUBTILE;
use cubecl::prelude::*;

/// What comes through the ring, and where it lies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands {
    pub keys: HeadSource,
    pub values: HeadSource,
    /// Where the ring starts in shared memory.
    pub ring: u32,
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
    /// The slot of its first chunk.
    pub first_slot: u32,
}

/// Where the pass's `chunk`-th chunk lies, or one of the next pass.
#[cube]
pub(super) fn slot(
    operands: &Operands,
    pass: &Pass,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
) -> u32 {
    let bytes = comptime!(tiles.slot_bytes() as u32);
    if comptime!(tiles.chunks().is_multiple_of(tiles.slots)) {
        operands.ring + comptime!((chunk % tiles.slots) as u32 * bytes)
    } else {
        operands.ring + slot_after(pass.first_slot, comptime!(chunk % tiles.slots), tiles) * bytes
    }
}

/// The slot so many after `first`, fewer than there are.
#[cube]
pub(super) fn slot_after(
    first: u32,
    #[comptime] count: usize,
    #[comptime] tiles: SplitDTiles,
) -> u32 {
    let sum = first + comptime!(count as u32);
    let slots = comptime!(tiles.slots as u32);
    select(sum >= slots, sum - slots, sum)
}

/// Starts to copy the pass's `chunk`-th chunk, or one of the next pass, and ends a group of copies, also where it is empty.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn fill(
    operands: &Operands,
    pass: &Pass,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
) {
    let target = slot(operands, pass, chunk, tiles);
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
                target,
                comptime!(key_section(tiles, index)),
                SplitDTiles::UNITS,
            );
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
                target,
                comptime!(value_section(tiles, own % tiles.value_parts)),
                SplitDTiles::UNITS,
            );
        }
    }
    commit_copies();
}

const fn key_section(tiles: SplitDTiles, chunk: usize) -> Section {
    Section {
        rows: tiles.keys,
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
