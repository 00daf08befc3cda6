//! A block's chunks on their way through the ring: dots by columns, values by columns, and what is summed by rows.
//!
//! A chunk is full once the copies of all threads are there, and empty once all warps have read it. Nobody stops for the others: a warp
//! goes on to the next chunk where that is full, and where it is ahead waits for the slot that it is to fill.

use crate::engine::mma::backward::copies::copy_terms;
use crate::engine::mma::forward::copies::{
    HeadRows, HeadSource, Section, copy_section, head_source,
};
use crate::engine::mma::plan::GradientSplitDTiles;
use crate::fragment::stationary::{Stationary, Visit};
use crate::math::side::Side;
use cube_kit::ampere::BARRIER_BYTES;
use cube_kit::ampere::barriers::{arrive_with_copies, await_phase};
use cube_kit::ampere::copy::half_address;
use cube_kit::hopper::SUBTILE;
use cubecl::prelude::*;

/// An operand of the other side: its rows of the tile's first head.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Passed {
    address: u64,
    head_bytes: u64,
    row_bytes: u64,
}

/// The rows that a tile passes over.
#[cube]
pub(super) fn passed<E: Float>(source: &Tensor<E>, tile: &Stationary) -> Passed {
    let start =
        tile.batch as usize * source.stride(0) + tile.first_head as usize * source.stride(1);
    Passed {
        address: half_address::<E>(source, start as u64),
        head_bytes: source.stride(1) as u64 * 2u64,
        row_bytes: source.stride(2) as u64 * 2u64,
    }
}

/// The rows that a tile holds.
#[cube]
pub(super) fn held_rows<E: Float>(
    source: &Tensor<E>,
    tile: &Stationary,
    #[comptime] tiles: GradientSplitDTiles,
) -> HeadSource {
    let end = if comptime!(tiles.side == Side::Queries) {
        tile.sight.q_len
    } else {
        tile.sight.length
    };
    let head = HeadRows {
        batch: tile.batch,
        head: tile.head,
        first: 0i32.runtime(),
        end,
    };
    head_source::<E>(source, head)
}

/// What comes to shared memory, and where it lies there.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands {
    pub held_dots: HeadSource,
    pub held_values: HeadSource,
    pub dots: Passed,
    pub values: Passed,
    /// Where shared memory starts.
    pub start: u32,
}

/// A pass over a block, and where its chunks are.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Pass {
    pub visit: Visit,
    pub next: Visit,
    pub first: Turn,
    /// 0 and 1 by turns.
    pub stage: u32,
}

/// A slot, and the parity of how often the ring has been gone through.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Turn {
    pub slot: u32,
    pub parity: u32,
}

/// The turn so many after one.
#[cube]
pub(super) fn turn_after(
    first: &Turn,
    #[comptime] count: usize,
    #[comptime] tiles: GradientSplitDTiles,
) -> Turn {
    let slots = comptime!(tiles.slots as u32);
    let rounds = comptime!((count / tiles.slots % 2) as u32);
    if comptime!(tiles.chunks().is_multiple_of(tiles.slots)) {
        // Every pass starts with the first slot.
        Turn {
            slot: u32::new(comptime!((count % tiles.slots) as i64)),
            parity: first.parity ^ rounds,
        }
    } else {
        let sum = first.slot + comptime!((count % tiles.slots) as u32);
        let wraps = sum >= slots;
        Turn {
            slot: select(wraps, sum - slots, sum),
            parity: first.parity ^ rounds ^ u32::cast_from(wraps),
        }
    }
}

/// Where a chunk lies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Place {
    pub slot: u32,
    /// The barriers at which it is told that the slot is full, and that it is empty.
    pub full: u32,
    pub empty: u32,
    pub parity: u32,
}

/// Where the pass's `chunk`-th chunk lies, or one of the next pass.
#[cube]
pub(super) fn place_of(
    operands: &Operands,
    pass: &Pass,
    #[comptime] chunk: usize,
    #[comptime] tiles: GradientSplitDTiles,
) -> Place {
    let turn = turn_after(&pass.first, chunk, tiles);
    let barriers = operands.start
        + comptime!(tiles.barriers_at() as u32)
        + turn.slot * comptime!(GradientSplitDTiles::SLOT_BARRIERS as u32);
    Place {
        slot: operands.start
            + comptime!(tiles.ring_at() as u32)
            + turn.slot * comptime!(tiles.slot_bytes() as u32),
        full: barriers,
        empty: barriers + comptime!(BARRIER_BYTES as u32),
        parity: turn.parity,
    }
}

/// Where a block's terms lie.
#[cube]
pub(super) fn terms_place(
    operands: &Operands,
    stage: u32,
    #[comptime] tiles: GradientSplitDTiles,
) -> u32 {
    operands.start
        + comptime!(tiles.terms_at() as u32)
        + stage * comptime!(tiles.term_bytes() as u32)
}

/// Starts to copy what stays of the tile. The first chunk is full once this is there, too.
#[cube]
pub(super) fn copy_held(
    operands: &Operands,
    tile: &Stationary,
    #[comptime] tiles: GradientSplitDTiles,
) {
    if comptime!(tiles.holds(false)) {
        copy_section(
            operands.held_dots,
            tile.first_row,
            operands.start,
            comptime!(whole_section(tiles.rows, tiles.head_dim)),
            GradientSplitDTiles::UNITS,
        );
    }
    if comptime!(tiles.sums.has_dots() && tiles.holds(true)) {
        copy_section(
            operands.held_values,
            tile.first_row,
            operands.start + comptime!(tiles.stationary_values_at() as u32),
            comptime!(whole_section(tiles.rows, tiles.value_dim)),
            GradientSplitDTiles::UNITS,
        );
    }
}

/// Starts to copy the pass's `chunk`-th chunk, or one of the next pass if there is one, once all have read what was in its slot.
#[cube]
pub(super) fn fill(
    operands: &Operands,
    terms: &Tensor<f32>,
    tile: &Stationary,
    pass: &Pass,
    #[comptime] chunk: usize,
    #[comptime] tiles: GradientSplitDTiles,
) {
    let of_next = comptime!(chunk >= tiles.chunks());
    let index = comptime!(chunk % tiles.chunks());
    let visit = if comptime!(of_next) {
        pass.next
    } else {
        pass.visit
    };
    if visit.head < tile.heads {
        let place = place_of(operands, pass, chunk, tiles);
        await_phase(place.empty, place.parity ^ 1u32);
        let row = visit.block * comptime!(tiles.columns as i32);
        if comptime!(index < tiles.dot_chunks()) {
            copy_scored(
                rows_of(operands.dots, tile, visit.head, tiles),
                operands.held_dots,
                row,
                tile.first_row,
                place.slot,
                tiles.head_dim,
                index,
                comptime!(tiles.holds(false)),
                tiles,
            );
            if comptime!(index == 0 && tiles.side == Side::Keys) {
                let stage = if comptime!(of_next) {
                    pass.stage ^ 1u32
                } else {
                    pass.stage
                };
                copy_terms(
                    terms,
                    tile.batch,
                    tile.first_head + visit.head,
                    row as u32,
                    terms_place(operands, stage, tiles),
                    tiles.columns,
                    tiles.terms,
                );
            }
        } else if comptime!(index < tiles.dot_chunks() + tiles.value_chunks()) {
            copy_scored(
                rows_of(operands.values, tile, visit.head, tiles),
                operands.held_values,
                row,
                tile.first_row,
                place.slot,
                tiles.value_dim,
                comptime!(index - tiles.dot_chunks()),
                comptime!(tiles.holds(true)),
                tiles,
            );
        } else {
            let own = comptime!(index - tiles.dot_chunks() - tiles.value_chunks());
            let row = row + comptime!((own * tiles.sum_rows) as i32);
            if comptime!(tiles.sums.has_dots()) {
                copy_section(
                    rows_of(operands.dots, tile, visit.head, tiles),
                    row,
                    place.slot,
                    comptime!(sum_section(tiles, tiles.head_dim)),
                    GradientSplitDTiles::UNITS,
                );
            }
            if comptime!(tiles.sums.has_values()) {
                copy_section(
                    rows_of(operands.values, tile, visit.head, tiles),
                    row,
                    place.slot + comptime!(((tiles.gradients() - 1) * tiles.sum_bytes()) as u32),
                    comptime!(sum_section(tiles, tiles.value_dim)),
                    GradientSplitDTiles::UNITS,
                );
            }
        }
        arrive_with_copies(place.full);
    }
}

/// The rows of an operand's `head`-th head, of which there are those of the tile's run.
#[cube]
fn rows_of(
    operand: Passed,
    tile: &Stationary,
    head: u32,
    #[comptime] tiles: GradientSplitDTiles,
) -> HeadSource {
    let address = if comptime!(tiles.side == Side::Queries) {
        operand.address
    } else {
        operand.address + head as u64 * operand.head_bytes
    };
    HeadSource {
        address,
        row_bytes: operand.row_bytes,
        first: tile.run.first,
        end: tile.run.end,
    }
}

/// Starts to copy some columns of a block's rows, and, where these do not stay, of the tile's.
#[cube]
fn copy_scored(
    rows: HeadSource,
    held: HeadSource,
    row: i32,
    held_row: i32,
    slot: u32,
    #[comptime] width: usize,
    #[comptime] chunk: usize,
    #[comptime] holds: bool,
    #[comptime] tiles: GradientSplitDTiles,
) {
    copy_section(
        rows,
        row,
        slot,
        comptime!(score_section(tiles, tiles.columns, width, chunk)),
        GradientSplitDTiles::UNITS,
    );
    if comptime!(!holds) {
        copy_section(
            held,
            held_row,
            slot + comptime!(tiles.tile_rows_at() as u32),
            comptime!(score_section(tiles, tiles.rows, width, chunk)),
            GradientSplitDTiles::UNITS,
        );
    }
}

const fn whole_section(rows: usize, width: usize) -> Section {
    Section {
        rows,
        first_column: 0,
        subtiles: width.div_ceil(SUBTILE),
        width,
    }
}

const fn score_section(
    tiles: GradientSplitDTiles,
    rows: usize,
    width: usize,
    chunk: usize,
) -> Section {
    Section {
        rows,
        first_column: chunk * tiles.score_columns,
        subtiles: tiles.chunk_columns(width, chunk).div_ceil(SUBTILE),
        width,
    }
}

const fn sum_section(tiles: GradientSplitDTiles, width: usize) -> Section {
    Section {
        rows: tiles.sum_rows,
        first_column: 0,
        subtiles: tiles.sum_subtiles(),
        width,
    }
}
