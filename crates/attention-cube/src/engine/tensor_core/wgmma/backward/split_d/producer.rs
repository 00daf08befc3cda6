//! The producer warpgroup of the split-D backward. One of its threads copies the operands to shared memory by TMA.

use crate::engine::tensor_core::common::scoring::Masking;
use crate::engine::tensor_core::common::stationary_tile::{Stationary, first_visit, visit_from};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::backward::load::{GradientSteps, fetch_stationary};
use crate::engine::tensor_core::wgmma::plan::{WgmmaGradientSplitDTiles, WgmmaSplitDTiles};
use crate::math::side::Side;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_expect, barrier_wait, tma_load};
use cube_kit::hopper::tma::load_subtiles;
use cube_kit::nvidia::{ROW_BYTES, SUBTILE, is_whole};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The shared memory addresses of the buffers and barriers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct SharedOffsets {
    pub stationary_qk: u32,
    pub stationary_v_do: u32,
    pub stages: u32,
    /// The address of the buffer of P or dS.
    pub factors: u32,
    pub lse_delta: u32,
    pub full: u32,
    pub empty: u32,
    pub stationary_full: u32,
    pub used: u32,
}

#[cube]
pub(super) fn offsets(start: u32, #[comptime] tiles: WgmmaGradientSplitDTiles) -> SharedOffsets {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let each = comptime!(8 * tiles.stages as u32);
    SharedOffsets {
        stationary_qk: start,
        stationary_v_do: start + comptime!(tiles.stationary_dot_bytes() as u32),
        stages: start + comptime!(tiles.stages_at() as u32),
        factors: start + comptime!(tiles.factors_at() as u32),
        lse_delta: start + comptime!(tiles.lse_delta_at() as u32),
        full: barriers,
        empty: barriers + each,
        stationary_full: barriers + 2u32 * each,
        used: start + comptime!(tiles.used_at() as u32),
    }
}

/// Copies the stationary tile, then the chunks of every block that the tile sees. The chunks come in the order in which
/// the consumers need them.
#[cube]
pub(super) fn fetch<E: Float>(
    stationary_qk: &TensorMap<E, Tiled>,
    stationary_v_do: &TensorMap<E, Tiled>,
    q_or_k: &TensorMap<E, Tiled>,
    v_or_do: &TensorMap<E, Tiled>,
    summed: &TensorMap<E, Tiled>,
    term_tma_tiles: &TensorMap<f32, Tiled>,
    masking: &Masking,
    tile: &Stationary,
    steps: &GradientSteps,
    offsets: &SharedOffsets,
    #[comptime] tiles: WgmmaGradientSplitDTiles,
    #[comptime] kind: TileKind,
) {
    let first = first_visit(tile, masking, kind);
    let mut head = first.head;
    let mut block = first.block;
    if head < tile.heads {
        fetch_stationary(
            stationary_qk,
            stationary_v_do,
            tile,
            steps,
            offsets.stationary_qk,
            offsets.stationary_v_do,
            offsets.stationary_full,
            PRODUCT_ROWS,
            tiles.head_dim,
            tiles.value_dim,
            comptime!(tiles.stationary_dot_bytes() + tiles.stationary_value_bytes()),
        );
    }
    let dot_map = tensor_map_address(q_or_k);
    let value_map = tensor_map_address(v_or_do);
    let summed_map = tensor_map_address(summed);
    let mut count = 0u32;
    let mut passed = 0u32;
    while head < tile.heads {
        let other_head = tile.first_head + head;
        let dot_batch = tile.batch * steps.dot_batch;
        let dot_head = other_head * steps.dot_head;
        let value_batch = tile.batch * steps.value_batch;
        let value_head = other_head * steps.value_head;
        let row = block * comptime!(WgmmaGradientSplitDTiles::COLUMNS as i32);
        #[unroll]
        for part in 0..comptime!(tiles.dot_chunks()) {
            let lse_delta = comptime!(part == 0 && tiles.side == Side::Keys);
            let bytes = comptime!(if lse_delta { tiles.term_bytes() } else { 0 });
            let place = next_stage(
                offsets,
                passed,
                comptime!(WgmmaSplitDTiles::STAGE_BYTES + bytes),
                tiles,
            );
            if comptime!(lse_delta) {
                // Two buffers alternate, so this copy overwrites the LSE and delta from two blocks ago. The consumers
                // had read these old values before they freed the stage `place`.
                tma_load(
                    offsets.lse_delta + count % 2u32 * comptime!(tiles.term_bytes() as u32),
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
                WgmmaSplitDTiles::STAGE_BYTES,
                comptime!(is_whole(tiles.head_dim)),
            );
            passed += 1u32;
        }
        if comptime!(tiles.sums.has_q_or_k()) {
            #[unroll]
            for part in 0..comptime!(tiles.value_chunks()) {
                let place = next_stage(offsets, passed, WgmmaSplitDTiles::STAGE_BYTES, tiles);
                load_subtiles(
                    place.at,
                    value_map,
                    value_batch,
                    value_head,
                    row,
                    place.full,
                    comptime!(part * SUBTILE),
                    1usize,
                    WgmmaSplitDTiles::STAGE_BYTES,
                    comptime!(is_whole(tiles.value_dim)),
                );
                passed += 1u32;
            }
        }
        let sum_batch = if comptime!(tiles.sums.has_q_or_k()) {
            dot_batch
        } else {
            value_batch
        };
        let sum_head = if comptime!(tiles.sums.has_q_or_k()) {
            dot_head
        } else {
            value_head
        };
        #[unroll]
        for part in 0..comptime!(tiles.sum_chunks()) {
            let place = next_stage(offsets, passed, comptime!(tiles.sum_bytes()), tiles);
            let first_row = comptime!(
                (part / WgmmaSplitDTiles::WARPGROUPS * WgmmaSplitDTiles::VALUE_KEYS) as i32
            );
            load_subtiles(
                place.at,
                summed_map,
                sum_batch,
                sum_head,
                row + first_row,
                place.full,
                comptime!(part % WgmmaSplitDTiles::WARPGROUPS * tiles.own_columns()),
                comptime!(tiles.own_subtiles()),
                comptime!(WgmmaSplitDTiles::VALUE_KEYS * ROW_BYTES),
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

/// A free stage of the ring: the address of its buffer, and its full barrier.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct FreeStage {
    at: u32,
    full: u32,
}

/// Waits until the ring stage (shared-memory buffer) of the `index`-th chunk is free. Then tells the stage's full
/// barrier to expect `bytes` bytes, and returns the stage.
#[cube]
fn next_stage(
    offsets: &SharedOffsets,
    index: u32,
    #[comptime] bytes: usize,
    #[comptime] tiles: WgmmaGradientSplitDTiles,
) -> FreeStage {
    let chunk = pipeline_state(index, tiles.stages);
    let full = offsets.full + 8u32 * chunk.stage;
    barrier_wait(offsets.empty + 8u32 * chunk.stage, chunk.parity ^ 1u32);
    barrier_expect(full, bytes);
    FreeStage {
        at: offsets.stages + chunk.stage * comptime!(WgmmaSplitDTiles::STAGE_BYTES as u32),
        full,
    }
}
