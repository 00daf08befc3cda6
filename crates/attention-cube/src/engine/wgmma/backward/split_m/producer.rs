//! The warpgroup that fetches: one thread of it keeps the rings full.

use crate::engine::wgmma::backward::copies::{GradientSteps, fetch_stationary};
use crate::engine::wgmma::plan::GradientSplitMTiles;
use crate::fragment::scoring::Masking;
use crate::fragment::stationary::{Stationary, first_visit, visit_from};
use crate::fragment::work_tile::TileKind;
use crate::math::side::Side;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_expect, barrier_wait, tma_load};
use cube_kit::hopper::tma::load_subtiles;
use cube_kit::hopper::{ROW_BYTES, is_whole};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Where things are in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Places {
    pub stationary_dots: u32,
    pub stationary_values: u32,
    pub dots: u32,
    pub values: u32,
    pub terms: u32,
    pub dot_full: u32,
    pub dot_empty: u32,
    pub value_full: u32,
    pub value_empty: u32,
    pub stationary_full: u32,
    pub used: u32,
}

#[cube]
pub(super) fn places(start: u32, #[comptime] tiles: GradientSplitMTiles) -> Places {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let dots = comptime!(8 * tiles.dot_stages as u32);
    let values = comptime!(8 * tiles.value_stages as u32);
    Places {
        stationary_dots: start,
        stationary_values: start + comptime!(tiles.stationary_dot_bytes() as u32),
        dots: start + comptime!(tiles.dots_at() as u32),
        values: start + comptime!(tiles.values_at() as u32),
        terms: start + comptime!(tiles.terms_at() as u32),
        dot_full: barriers,
        dot_empty: barriers + dots,
        value_full: barriers + 2u32 * dots,
        value_empty: barriers + 2u32 * dots + values,
        stationary_full: barriers + 2u32 * dots + 2u32 * values,
        used: start + comptime!(tiles.used_at() as u32),
    }
}

/// Copies what the tile holds, and dots and values of every visited block in the order of their use.
#[cube]
pub(super) fn fetch<E: Float>(
    stationary_dots: &TensorMap<E, Tiled>,
    stationary_values: &TensorMap<E, Tiled>,
    dots: &TensorMap<E, Tiled>,
    values: &TensorMap<E, Tiled>,
    term_tma_tiles: &TensorMap<f32, Tiled>,
    masking: &Masking,
    tile: &Stationary,
    steps: &GradientSteps,
    places: &Places,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
) {
    let dot_map = tensor_map_address(dots);
    let value_map = tensor_map_address(values);
    let first = first_visit(tile, masking, kind);
    let mut head = first.head;
    let mut block = first.block;
    if head < tile.heads {
        fetch_stationary(
            stationary_dots,
            stationary_values,
            tile,
            steps,
            places.stationary_dots,
            places.stationary_values,
            places.stationary_full,
            comptime!(tiles.rows()),
            tiles.head_dim,
            tiles.value_dim,
            comptime!(tiles.stationary_dot_bytes() + tiles.stationary_value_bytes()),
        );
    }
    let mut count = 0u32;
    while head < tile.heads {
        let other_head = tile.first_head + head;
        let first_column = block * comptime!(tiles.columns as i32);
        let slot = pipeline_state(count, tiles.dot_stages);
        let full = places.dot_full + 8u32 * slot.stage;
        barrier_wait(places.dot_empty + 8u32 * slot.stage, slot.parity ^ 1u32);
        barrier_expect(full, comptime!(tiles.dot_bytes() + tiles.term_bytes()));
        load_subtiles(
            places.dots + slot.stage * comptime!(tiles.dot_bytes() as u32),
            dot_map,
            tile.batch * steps.dot_batch,
            other_head * steps.dot_head,
            first_column,
            full,
            0usize,
            comptime!(tiles.dot_subtiles()),
            comptime!(tiles.columns * ROW_BYTES),
            comptime!(is_whole(tiles.head_dim)),
        );
        if comptime!(tiles.side == Side::Keys) {
            tma_load(
                places.terms + slot.stage * comptime!(tiles.term_stride() as u32),
                tensor_map_address(term_tma_tiles),
                tile.batch,
                other_head,
                0i32,
                first_column as u32,
                full,
            );
        }
        let slot = pipeline_state(count, tiles.value_stages);
        let full = places.value_full + 8u32 * slot.stage;
        barrier_wait(places.value_empty + 8u32 * slot.stage, slot.parity ^ 1u32);
        barrier_expect(full, comptime!(tiles.value_bytes()));
        load_subtiles(
            places.values + slot.stage * comptime!(tiles.value_bytes() as u32),
            value_map,
            tile.batch * steps.value_batch,
            other_head * steps.value_head,
            first_column,
            full,
            0usize,
            comptime!(tiles.value_subtiles()),
            comptime!(tiles.columns * ROW_BYTES),
            comptime!(is_whole(tiles.value_dim)),
        );
        count += 1u32;
        let next = visit_from(tile, head, block + 1i32, masking, kind);
        head = next.head;
        block = next.block;
    }
}
