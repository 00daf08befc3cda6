//! Copies to shared memory: the tile's own rows, and the blocks that the tile streams.

use crate::engine::tensor_core::common::stationary_tile::Stationary;
use crate::engine::tensor_core::mma::backward::load::{copy_lse_delta, stationary_head};
use crate::engine::tensor_core::mma::forward::load::{HeadRows, copy_rows};
use crate::engine::tensor_core::mma::plan::MmaGradientSplitMTiles;
use crate::math::side::Side;
use cubecl::prelude::*;

/// Starts the copy of the tile's rows of Q or K. If the kernel needs the tile's rows of V or dO, the function also
/// starts the copy of these rows. The copies write zeros for rows that do not exist.
#[cube]
pub(super) fn copy_stationary<E: Float>(
    q_or_k: &Tensor<E>,
    v_or_do: &Tensor<E>,
    tile: &Stationary,
    start: u32,
    #[comptime] tiles: MmaGradientSplitMTiles,
) {
    let head = stationary_head(tile, tiles.side);
    copy_rows::<E>(
        q_or_k,
        head,
        tile.first_row,
        start,
        comptime!(tiles.rows()),
        tiles.head_dim,
        comptime!(tiles.units()),
    );
    if comptime!(tiles.sums.has_q_or_k()) {
        copy_rows::<E>(
            v_or_do,
            head,
            tile.first_row,
            start + comptime!(tiles.stationary_values_at() as u32),
            comptime!(tiles.rows()),
            tiles.value_dim,
            comptime!(tiles.units()),
        );
    }
}

/// Starts the copy of a block to address `target`. `head` is the index of the block's head among the heads that the
/// tile streams. The copy writes zeros for rows that the tile does not see.
#[cube]
pub(super) fn copy_block<E: Float>(
    q_or_k: &Tensor<E>,
    v_or_do: &Tensor<E>,
    lse_delta: &Tensor<f32>,
    tile: &Stationary,
    head: u32,
    block: i32,
    target: u32,
    #[comptime] tiles: MmaGradientSplitMTiles,
) {
    let first_row = block * comptime!(tiles.columns as i32);
    let head_rows = HeadRows {
        batch: tile.batch,
        head: tile.first_head + head,
        first: tile.run.first,
        end: tile.run.end,
    };
    copy_rows::<E>(
        q_or_k,
        head_rows,
        first_row,
        target,
        tiles.columns,
        tiles.head_dim,
        comptime!(tiles.units()),
    );
    copy_rows::<E>(
        v_or_do,
        head_rows,
        first_row,
        target + comptime!(tiles.block_values_at() as u32),
        tiles.columns,
        tiles.value_dim,
        comptime!(tiles.units()),
    );
    if comptime!(tiles.side == Side::Keys) {
        copy_lse_delta(
            lse_delta,
            tile.batch,
            tile.first_head + head,
            first_row as u32,
            target + comptime!(tiles.block_lse_delta_at() as u32),
            tiles.columns,
            tiles.lse_delta,
        );
    }
}
