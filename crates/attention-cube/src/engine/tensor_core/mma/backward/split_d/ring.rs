//! The copies of a block's chunks to the [ring](crate::engine::tensor_core::mma::ring) of slots in shared memory. For
//! the GEMMs of S and dP, a chunk has some columns of a block. For the gradient GEMM, a chunk has some rows of a block.

use crate::engine::tensor_core::common::stationary_tile::{Stationary, Visit};
use crate::engine::tensor_core::mma::backward::load::{copy_lse_delta, stationary_head};
use crate::engine::tensor_core::mma::forward::load::{
    HeadSource, Section, copy_section, head_source,
};
use crate::engine::tensor_core::mma::plan::MmaGradientSplitDTiles;
use crate::engine::tensor_core::mma::ring::{RingTurn, await_empty, ring_slot_of, signal_full};
use crate::math::side::Side;
use cube_kit::ampere::cp_async::half_address;
use cube_kit::nvidia::SUBTILE;
use cubecl::prelude::*;

/// An operand whose blocks the kernel streams. A tile streams the blocks of one or several heads. `address` is the
/// global-memory address of the first of these heads.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Passed {
    address: u64,
    head_bytes: u64,
    row_bytes: u64,
}

/// Returns the address and the strides of a streamed operand. The address is that of the first head whose blocks the
/// tile streams.
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

/// Returns the address and the strides of the operand that has the tile's own rows, for the tile's head.
#[cube]
pub(super) fn stationary_rows<E: Float>(
    source: &Tensor<E>,
    tile: &Stationary,
    #[comptime] tiles: MmaGradientSplitDTiles,
) -> HeadSource {
    head_source::<E>(source, stationary_head(tile, tiles.side))
}

/// The addresses of all operands of a CTA in global memory, and the address of the CTA's shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands {
    pub resident_q_or_k: HeadSource,
    pub resident_v_or_do: HeadSource,
    pub q_or_k: Passed,
    pub v_or_do: Passed,
    /// The address at which the CTA's shared memory starts.
    pub start: u32,
}

/// One iteration of the main loop. `visit` is the block that this iteration multiplies, and `next` is the block of the
/// next iteration. `first` is the ring slot of this iteration's first chunk.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct GradientStep {
    pub visit: Visit,
    pub next: Visit,
    pub first: RingTurn,
    /// The index of the buffer that holds the block's LSE and delta. From block to block, the index alternates between
    /// 0 and 1.
    pub stage: u32,
}

/// Returns the address of the LSE and delta of a block's queries in shared memory. `stage` is the index of the buffer
/// that holds these values.
#[cube]
pub(super) fn lse_delta_offset(
    operands: &Operands,
    stage: u32,
    #[comptime] tiles: MmaGradientSplitDTiles,
) -> u32 {
    operands.start
        + comptime!(tiles.lse_delta_at() as u32)
        + stage * comptime!(tiles.term_bytes() as u32)
}

/// Starts the copies of the tile's operands that stay in shared memory. A warp that waits for the first streamed chunk
/// also waits for these copies.
#[cube]
pub(super) fn copy_stationary(
    operands: &Operands,
    tile: &Stationary,
    #[comptime] tiles: MmaGradientSplitDTiles,
) {
    if comptime!(tiles.holds(false)) {
        copy_section(
            operands.resident_q_or_k,
            tile.first_row,
            operands.start,
            comptime!(whole_section(tiles.rows, tiles.head_dim)),
            MmaGradientSplitDTiles::UNITS,
        );
    }
    if comptime!(tiles.sums.has_q_or_k() && tiles.holds(true)) {
        copy_section(
            operands.resident_v_or_do,
            tile.first_row,
            operands.start + comptime!(tiles.stationary_values_at() as u32),
            comptime!(whole_section(tiles.rows, tiles.value_dim)),
            MmaGradientSplitDTiles::UNITS,
        );
    }
}

/// Refills a ring slot with the `chunk`-th chunk of an iteration (`pass`). First waits until all warps have read the
/// chunk that the slot holds. Then starts the copy of the new chunk. If `chunk` is past the iteration's last chunk, the
/// new chunk belongs to the next iteration. If there is no next iteration, the function then does nothing.
#[cube]
pub(super) fn fill(
    operands: &Operands,
    lse_delta: &Tensor<f32>,
    tile: &Stationary,
    pass: &GradientStep,
    #[comptime] chunk: usize,
    #[comptime] tiles: MmaGradientSplitDTiles,
) {
    let of_next = comptime!(chunk >= tiles.chunks());
    let index = comptime!(chunk % tiles.chunks());
    let visit = if comptime!(of_next) {
        pass.next
    } else {
        pass.visit
    };
    if visit.head < tile.heads {
        let place = ring_slot_of(operands.start, &pass.first, chunk, comptime!(tiles.ring()));
        await_empty(&place);
        let row = visit.block * comptime!(tiles.columns as i32);
        if comptime!(index < tiles.dot_chunks()) {
            copy_scored(
                rows_of(operands.q_or_k, tile, visit.head, tiles),
                operands.resident_q_or_k,
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
                copy_lse_delta(
                    lse_delta,
                    tile.batch,
                    tile.first_head + visit.head,
                    row as u32,
                    lse_delta_offset(operands, stage, tiles),
                    tiles.columns,
                    tiles.lse_delta,
                );
            }
        } else if comptime!(index < tiles.dot_chunks() + tiles.value_chunks()) {
            copy_scored(
                rows_of(operands.v_or_do, tile, visit.head, tiles),
                operands.resident_v_or_do,
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
            if comptime!(tiles.sums.has_q_or_k()) {
                copy_section(
                    rows_of(operands.q_or_k, tile, visit.head, tiles),
                    row,
                    place.slot,
                    comptime!(sum_section(tiles, tiles.head_dim)),
                    MmaGradientSplitDTiles::UNITS,
                );
            }
            if comptime!(tiles.sums.has_values()) {
                copy_section(
                    rows_of(operands.v_or_do, tile, visit.head, tiles),
                    row,
                    place.slot + comptime!(((tiles.gradients() - 1) * tiles.sum_bytes()) as u32),
                    comptime!(sum_section(tiles, tiles.value_dim)),
                    MmaGradientSplitDTiles::UNITS,
                );
            }
        }
        signal_full(&place);
    }
}

/// Returns the address and the strides of a streamed operand's rows, for the `head`-th of the heads that the tile
/// streams. Copies of these rows write zeros for rows outside of the tile's visible range.
#[cube]
fn rows_of(
    operand: Passed,
    tile: &Stationary,
    head: u32,
    #[comptime] tiles: MmaGradientSplitDTiles,
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

/// Starts the copy of the `chunk`-th column chunk of a block to a slot. If the tile's own rows do not stay in shared
/// memory, the function also copies the same columns of the tile's rows to the slot.
#[cube]
fn copy_scored(
    rows: HeadSource,
    stationary_tile: HeadSource,
    row: i32,
    held_row: i32,
    slot: u32,
    #[comptime] width: usize,
    #[comptime] chunk: usize,
    #[comptime] holds: bool,
    #[comptime] tiles: MmaGradientSplitDTiles,
) {
    copy_section(
        rows,
        row,
        slot,
        comptime!(score_section(tiles, tiles.columns, width, chunk)),
        MmaGradientSplitDTiles::UNITS,
    );
    if comptime!(!holds) {
        copy_section(
            stationary_tile,
            held_row,
            slot + comptime!(tiles.tile_rows_at() as u32),
            comptime!(score_section(tiles, tiles.rows, width, chunk)),
            MmaGradientSplitDTiles::UNITS,
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
    tiles: MmaGradientSplitDTiles,
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

const fn sum_section(tiles: MmaGradientSplitDTiles, width: usize) -> Section {
    Section {
        rows: tiles.sum_rows,
        first_column: 0,
        subtiles: tiles.sum_subtiles(),
        width,
    }
}
