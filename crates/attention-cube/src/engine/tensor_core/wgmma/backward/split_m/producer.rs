//! The producer warpgroup of the split-M backward. One of its threads copies the operands to shared memory by TMA.

use crate::engine::tensor_core::common::scoring::Masking;
use crate::engine::tensor_core::common::stationary_tile::{Stationary, first_visit, visit_from};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::backward::load::{GradientSteps, fetch_stationary};
use crate::engine::tensor_core::wgmma::plan::WgmmaGradientSplitMTiles;
use crate::math::side::Side;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_expect, barrier_wait, tma_load};
use cube_kit::hopper::tma::{load_columns, load_subtiles};
use cube_kit::nvidia::{ROW_BYTES, is_whole};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The shared memory addresses of the buffers and barriers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct SharedOffsets {
    pub stationary_qk: u32,
    pub stationary_v_do: u32,
    pub q_or_k: u32,
    pub v_or_do: u32,
    pub biases: u32,
    pub lse_delta: u32,
    pub dot_full: u32,
    pub dot_empty: u32,
    pub value_full: u32,
    pub value_empty: u32,
    pub stationary_full: u32,
    pub used: u32,
}

#[cube]
pub(super) fn offsets(start: u32, #[comptime] tiles: WgmmaGradientSplitMTiles) -> SharedOffsets {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let q_or_k = comptime!(8 * tiles.dot_stages as u32);
    let v_or_do = comptime!(8 * tiles.value_stages as u32);
    SharedOffsets {
        stationary_qk: start,
        stationary_v_do: start + comptime!(tiles.stationary_dot_bytes() as u32),
        q_or_k: start + comptime!(tiles.q_or_k_at() as u32),
        v_or_do: start + comptime!(tiles.values_at() as u32),
        biases: start + comptime!(tiles.biases_at() as u32),
        lse_delta: start + comptime!(tiles.lse_delta_at() as u32),
        dot_full: barriers,
        dot_empty: barriers + q_or_k,
        value_full: barriers + 2u32 * q_or_k,
        value_empty: barriers + 2u32 * q_or_k + v_or_do,
        stationary_full: barriers + 2u32 * q_or_k + 2u32 * v_or_do,
        used: start + comptime!(tiles.used_at() as u32),
    }
}

/// Copies the stationary tile, the blocks of Q or K, and the blocks of V or dO. The copies come in the order in which
/// the consumers need the data.
#[cube]
pub(super) fn fetch<E: Float>(
    stationary_qk: &TensorMap<E, Tiled>,
    stationary_v_do: &TensorMap<E, Tiled>,
    q_or_k: &TensorMap<E, Tiled>,
    v_or_do: &TensorMap<E, Tiled>,
    bias_tma_tiles: &TensorMap<E, Tiled>,
    term_tma_tiles: &TensorMap<f32, Tiled>,
    masking: &Masking,
    tile: &Stationary,
    steps: &GradientSteps,
    offsets: &SharedOffsets,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
    #[comptime] kind: TileKind,
) {
    let dot_map = tensor_map_address(q_or_k);
    let value_map = tensor_map_address(v_or_do);
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
        let full = offsets.dot_full + 8u32 * slot.stage;
        barrier_wait(offsets.dot_empty + 8u32 * slot.stage, slot.parity ^ 1u32);
        barrier_expect(
            full,
            comptime!(tiles.dot_bytes() + tiles.bias_bytes() + tiles.term_bytes()),
        );
        load_subtiles(
            offsets.q_or_k + slot.stage * comptime!(tiles.dot_bytes() as u32),
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
        if comptime!(tiles.bias_boxes) {
            let (query_head, query, key) = if comptime!(tiles.side == Side::Queries) {
                (tile.head, tile.first_row, first_column as u32)
            } else {
                (other_head, first_column, tile.first_row as u32)
            };
            load_columns(
                offsets.biases + slot.stage * comptime!(tiles.bias_bytes() as u32),
                tensor_map_address(bias_tma_tiles),
                tile.batch * steps.bias_batch,
                query_head * steps.bias_head,
                query,
                key,
                full,
                comptime!(tiles.bias_subtiles()),
                comptime!(tiles.bias_rows() * ROW_BYTES),
            );
        }
        if comptime!(tiles.side == Side::Keys) {
            tma_load(
                offsets.lse_delta + slot.stage * comptime!(tiles.term_stride() as u32),
                tensor_map_address(term_tma_tiles),
                tile.batch,
                other_head,
                0i32,
                first_column as u32,
                full,
            );
        }
        let slot = pipeline_state(count, tiles.value_stages);
        let full = offsets.value_full + 8u32 * slot.stage;
        barrier_wait(offsets.value_empty + 8u32 * slot.stage, slot.parity ^ 1u32);
        barrier_expect(full, comptime!(tiles.value_bytes()));
        load_subtiles(
            offsets.v_or_do + slot.stage * comptime!(tiles.value_bytes() as u32),
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
