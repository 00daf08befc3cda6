//! How the rows that a tile holds, and the blocks that it passes over, come to shared memory.

use crate::engine::mma::backward::copies::{copy_terms, held_head};
use crate::engine::mma::forward::copies::{HeadRows, copy_rows};
use crate::engine::mma::plan::GradientSplitMTiles;
use crate::fragment::stationary::Stationary;
use crate::math::side::Side;
use cubecl::prelude::*;

/// Starts to copy what the tile holds: dots, and values where these are needed. Rows that do not exist become zeros.
#[cube]
pub(super) fn copy_stationary<E: Float>(
    dots: &Tensor<E>,
    values: &Tensor<E>,
    tile: &Stationary,
    start: u32,
    #[comptime] tiles: GradientSplitMTiles,
) {
    let head = held_head(tile, tiles.side);
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
    #[comptime] tiles: GradientSplitMTiles,
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
            tiles.columns,
            tiles.terms,
        );
    }
}
