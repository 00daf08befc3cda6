//! How the rows that a tile holds, and the blocks that it passes over, come to shared memory.

use crate::engine::mma::forward::copies::{HeadRows, copy_rows};
use crate::engine::mma::plan::GradientTiles;
use crate::fragment::stationary::Stationary;
use crate::math::side::Side;
use cube_kit::ampere::copy::{PIECE_BYTES, copy_piece};
use cube_kit::hopper::ptx::word_address;
use cubecl::prelude::*;

/// Starts to copy what the tile holds: dots, and values where these are needed. Rows that do not exist become zeros.
#[cube]
pub(super) fn copy_stationary<E: Float>(
    dots: &Tensor<E>,
    values: &Tensor<E>,
    tile: &Stationary,
    start: u32,
    #[comptime] tiles: GradientTiles,
) {
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
    copy_rows::<E>(
        dots,
        head,
        tile.first_row,
        start,
        comptime!(tiles.rows()),
        tiles.head_dim,
        comptime!(tiles.units()),
    );
    if comptime!(tiles.sums.has_dots()) {
        copy_rows::<E>(
            values,
            head,
            tile.first_row,
            start + comptime!(tiles.stationary_values_at() as u32),
            comptime!(tiles.rows()),
            tiles.value_dim,
            comptime!(tiles.units()),
        );
    }
}

/// Starts to copy a block of the `head`-th of the tile's other heads to `target`. Rows that nobody in the tile may see become zeros,
/// by its run.
#[cube]
pub(super) fn copy_block<E: Float>(
    dots: &Tensor<E>,
    values: &Tensor<E>,
    terms: &Tensor<f32>,
    tile: &Stationary,
    head: u32,
    block: i32,
    target: u32,
    #[comptime] tiles: GradientTiles,
) {
    let first_row = block * comptime!(tiles.columns as i32);
    let head_rows = HeadRows {
        batch: tile.batch,
        head: tile.first_head + head,
        first: tile.run.first,
        end: tile.run.end,
    };
    copy_rows::<E>(
        dots,
        head_rows,
        first_row,
        target,
        tiles.columns,
        tiles.head_dim,
        comptime!(tiles.units()),
    );
    copy_rows::<E>(
        values,
        head_rows,
        first_row,
        target + comptime!(tiles.block_values_at() as u32),
        tiles.columns,
        tiles.value_dim,
        comptime!(tiles.units()),
    );
    if comptime!(tiles.side == Side::Keys) {
        copy_terms(
            terms,
            tile.batch,
            tile.first_head + head,
            first_row as u32,
            target + comptime!(tiles.block_terms_at() as u32),
            tiles,
        );
    }
}

/// Terms of a piece.
const PIECE_TERMS: usize = PIECE_BYTES / 4;

/// Starts to copy the terms of a block's queries, the first of all of these first. They are padded with zeros to whole pieces.
#[cube]
fn copy_terms(
    terms: &Tensor<f32>,
    batch: u32,
    head: u32,
    first_query: u32,
    target: u32,
    #[comptime] tiles: GradientTiles,
) {
    let pieces = comptime!((tiles.columns / PIECE_TERMS) as u32);
    if UNIT_POS < comptime!(tiles.terms as u32) * pieces {
        let term = UNIT_POS / pieces;
        let query = first_query + UNIT_POS % pieces * comptime!(PIECE_TERMS as u32);
        let exists = query < terms.shape(3) as u32;
        let at = batch as usize * terms.stride(0)
            + head as usize * terms.stride(1)
            + term as usize * terms.stride(2)
            + query as usize;
        // SAFETY: only the address is taken.
        let source = word_address::<f32>(
            unsafe { terms.as_slice().as_ptr_unchecked() },
            select(exists, at as u64, 0u64),
        );
        copy_piece(
            target + UNIT_POS * comptime!(PIECE_BYTES as u32),
            source,
            select(exists, comptime!(PIECE_BYTES as u32), 0u32),
        );
    }
}
