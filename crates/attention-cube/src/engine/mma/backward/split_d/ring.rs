//! A block's chunks on their way through the [ring](crate::engine::mma::ring): dots by columns, values by columns, and what is summed by
//! rows.

use crate::engine::mma::backward::copies::{copy_terms, held_head};
use crate::engine::mma::forward::copies::{HeadSource, Section, copy_section, head_source};
use crate::engine::mma::plan::GradientSplitDTiles;
use crate::engine::mma::ring::{Turn, await_empty, place_of, tell_full};
use crate::fragment::stationary::{Stationary, Visit};
use crate::math::side::Side;
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
    head_source::<E>(source, held_head(tile, tiles.side))
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
        let place = place_of(operands.start, &pass.first, chunk, comptime!(tiles.ring()));
        await_empty(&place);
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
        tell_full(&place);
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
