//! The warpgroup that fetches: one thread of it keeps the ring full.

use crate::engine::wgmma::backward::copies::{GradientSteps, fetch_stationary};
use crate::engine::wgmma::plan::{GradientSplitDTiles, SplitDTiles};
use crate::fragment::scoring::Masking;
use crate::fragment::stationary::{Stationary, first_visit, visit_from};
use crate::fragment::work_tile::TileKind;
use crate::math::side::Side;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_expect, barrier_wait, tma_load};
use cube_kit::hopper::tma::load_subtiles;
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES, SUBTILE, is_whole};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Where things are in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Places {
    pub stationary_dots: u32,
    pub stationary_values: u32,
    pub stages: u32,
    /// P or dS.
    pub factors: u32,
    pub terms: u32,
    pub full: u32,
    pub empty: u32,
    pub stationary_full: u32,
    pub used: u32,
}

#[cube]
pub(super) fn places(start: u32, #[comptime] tiles: GradientSplitDTiles) -> Places {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let each = comptime!(8 * tiles.stages as u32);
    Places {
        stationary_dots: start,
        stationary_values: start + comptime!(tiles.stationary_dot_bytes() as u32),
        stages: start + comptime!(tiles.stages_at() as u32),
        factors: start + comptime!(tiles.factors_at() as u32),
        terms: start + comptime!(tiles.terms_at() as u32),
        full: barriers,
        empty: barriers + each,
        stationary_full: barriers + 2u32 * each,
        used: start + comptime!(tiles.used_at() as u32),
    }
}

/// Copies what the tile holds, and the chunks of every visited block in the order of their use.
#[cube]
pub(super) fn fetch<E: Float>(
    stationary_dots: &TensorMap<E, Tiled>,
    stationary_values: &TensorMap<E, Tiled>,
    dots: &TensorMap<E, Tiled>,
    values: &TensorMap<E, Tiled>,
    summed: &TensorMap<E, Tiled>,
    term_tma_tiles: &TensorMap<f32, Tiled>,
    masking: &Masking,
    tile: &Stationary,
    steps: &GradientSteps,
    places: &Places,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: TileKind,
) {
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
            PRODUCT_ROWS,
            tiles.head_dim,
            tiles.value_dim,
            comptime!(tiles.stationary_dot_bytes() + tiles.stationary_value_bytes()),
        );
    }
    let dot_map = tensor_map_address(dots);
    let value_map = tensor_map_address(values);
    let summed_map = tensor_map_address(summed);
    let mut count = 0u32;
    let mut passed = 0u32;
    while head < tile.heads {
        let other_head = tile.first_head + head;
        let dot_batch = tile.batch * steps.dot_batch;
        let dot_head = other_head * steps.dot_head;
        let value_batch = tile.batch * steps.value_batch;
        let value_head = other_head * steps.value_head;
        let row = block * comptime!(GradientSplitDTiles::COLUMNS as i32);
        #[unroll]
        for part in 0..comptime!(tiles.dot_chunks()) {
            let terms = comptime!(part == 0 && tiles.side == Side::Keys);
            let bytes = comptime!(if terms { tiles.term_bytes() } else { 0 });
            let place = next_stage(
                places,
                passed,
                comptime!(SplitDTiles::STAGE_BYTES + bytes),
                tiles,
            );
            if comptime!(terms) {
                // Those of the block before the last have been read: a later block's chunks are free.
                tma_load(
                    places.terms + count % 2u32 * comptime!(tiles.term_bytes() as u32),
                    tensor_map_address(term_tma_tiles),
                    tile.batch,
                    other_head,
                    0i32,
                    row as u32,
                    place.full,
                );
            }
            load_subtiles(
                place.at,
                dot_map,
                dot_batch,
                dot_head,
                row,
                place.full,
                comptime!(part * SUBTILE),
                1usize,
                SplitDTiles::STAGE_BYTES,
                comptime!(is_whole(tiles.head_dim)),
            );
            passed += 1u32;
        }
        if comptime!(tiles.sums.has_dots()) {
            #[unroll]
            for part in 0..comptime!(tiles.value_chunks()) {
                let place = next_stage(places, passed, SplitDTiles::STAGE_BYTES, tiles);
                load_subtiles(
                    place.at,
                    value_map,
                    value_batch,
                    value_head,
                    row,
                    place.full,
                    comptime!(part * SUBTILE),
                    1usize,
                    SplitDTiles::STAGE_BYTES,
                    comptime!(is_whole(tiles.value_dim)),
                );
                passed += 1u32;
            }
        }
        let sum_batch = if comptime!(tiles.sums.has_dots()) {
            dot_batch
        } else {
            value_batch
        };
        let sum_head = if comptime!(tiles.sums.has_dots()) {
            dot_head
        } else {
            value_head
        };
        #[unroll]
        for part in 0..comptime!(tiles.sum_chunks()) {
            let place = next_stage(places, passed, comptime!(tiles.sum_bytes()), tiles);
            let first_row =
                comptime!((part / SplitDTiles::WARPGROUPS * SplitDTiles::VALUE_KEYS) as i32);
            load_subtiles(
                place.at,
                summed_map,
                sum_batch,
                sum_head,
                row + first_row,
                place.full,
                comptime!(part % SplitDTiles::WARPGROUPS * tiles.own_columns()),
                comptime!(tiles.own_subtiles()),
                comptime!(SplitDTiles::VALUE_KEYS * ROW_BYTES),
                comptime!(tiles.has_whole_sums()),
            );
            passed += 1u32;
        }
        count += 1u32;
        let next = visit_from(tile, head, block + 1i32, masking, kind);
        head = next.head;
        block = next.block;
    }
}

/// A free stage.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct FreeStage {
    at: u32,
    full: u32,
}

/// Waits for the stage of the `index`-th chunk, which will have `bytes`.
#[cube]
fn next_stage(
    places: &Places,
    index: u32,
    #[comptime] bytes: usize,
    #[comptime] tiles: GradientSplitDTiles,
) -> FreeStage {
    let chunk = pipeline_state(index, tiles.stages);
    let full = places.full + 8u32 * chunk.stage;
    barrier_wait(places.empty + 8u32 * chunk.stage, chunk.parity ^ 1u32);
    barrier_expect(full, bytes);
    FreeStage {
        at: places.stages + chunk.stage * comptime!(SplitDTiles::STAGE_BYTES as u32),
        full,
    }
}
