//! The main loop of a warp over the blocks of its key group. A key group is one or two warps. The CTA has `key_groups`
//! key groups, and each processes every `key_groups`-th block of a tile.

use super::pages::page_of_block;
use super::scales::{column_scales, lane_scales, with_scales};
use super::stages::{Operands, Roles, fill, order_all_queries};
use crate::engine::tensor_core::common::block_range::{next_block_in_steps, tile_position};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::tile_scheduler::{AssignedTile, TileKind};
use crate::engine::tensor_core::mma::forward::warp::{
    MainloopOutput, WarpRows, empty_states, operand_codes, rescaled_fragments, score_product,
    warp_views, weights, with_values,
};
use crate::engine::tensor_core::mma::plan::split_n::MmaSplitNTiles;
use cube_kit::ampere::code_operand::word_scores;
use cube_kit::ampere::cp_async::await_copies;
use cube_kit::ampere::exchange::{exchange_address, load_registers, store_registers};
use cube_kit::ampere::mma::{left_address, right_address, scores};
use cube_kit::nvidia::ptx::named_barrier;
use cubecl::prelude::*;

/// Processes the blocks of the warp's key group, from the group's first block on. The CTA has `key_groups` key groups,
/// and each processes every `key_groups`-th block of the tile. Before the call, the caller must start the copies of the
/// queries as a separate `cp.async` group.
#[cube]
pub(super) fn run_mainloop<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size, AO: Size>(
    assigned: &AssignedTile,
    rows: &WarpRows,
    scoring: &Scoring<F, NB>,
    operands: &Operands,
    roles: &Roles,
    start: u32,
    scale_log2: f32,
    #[comptime] tiles: MmaSplitNTiles,
    #[comptime] kind: TileKind,
) -> MainloopOutput<AO> {
    let masking = &scoring.masking;
    let tile = &assigned.tile;
    let end = tile.end_block;
    let warp = comptime!(tiles.warp());
    let groups = comptime!(tiles.key_groups);
    let step = comptime!(tiles.key_groups as i32);
    let position = tile_position(tile);
    let query_at = left_address(roles.queries, 0u32);
    let key_at = right_address(roles.stages);
    let value_at = left_address(roles.stages + comptime!(tiles.key_bytes() as u32), 0u32);
    let mut o = Vector::<f32, AO>::zeroed();
    let mut states = empty_states(scoring.arguments.negative_infinity);
    let own = assigned.first + roles.key_group as i32;
    let mut block = next_block_in_steps(tile, own, masking, groups, kind);
    let mut ahead = block;
    let mut page = page_of_block(&operands.pages, ahead, tiles, kind);
    #[unroll]
    for stage in 0..comptime!(tiles.stages - 1) {
        let stage = u32::new(stage as i64);
        fill(operands, roles, ahead, page, stage, tiles, kind);
        ahead = next_block_in_steps(tile, ahead + step, masking, groups, kind);
        page = page_of_block(&operands.pages, ahead, tiles, kind);
    }
    let mut scales = lane_scales(&operands.scales, &operands.pages, block, tiles, kind);
    await_copies(comptime!(2 * (tiles.stages - 1)));
    sync_cube();
    if comptime!(tiles.codes.is_some()) {
        order_all_queries(start, tiles);
        sync_cube();
    }
    let exchange = start + comptime!(tiles.exchange_at() as u32);
    let mut stage = 0u32;
    let mut turn = 0u32;
    while block < end {
        // Wait only for the keys of this block. The copies of the block's values and of later blocks may still be in flight.
        await_copies(comptime!(2 * tiles.stages - 3));
        sync_plane();
        let free = last_stage(stage, tiles);
        fill(operands, roles, ahead, page, free, tiles, kind);
        let seen = warp_views(&position, rows, block, masking, warp, kind);
        let next = next_block_in_steps(tile, block + step, masking, groups, kind);
        let next_scales = lane_scales(&operands.scales, &operands.pages, next, tiles, kind);
        let offset = stage * comptime!(tiles.stage_bytes() as u32);
        let product = comptime!(score_product(warp, tiles.rows()));
        let mut s = if comptime!(tiles.codes.is_some()) {
            word_scores::<AS>(
                query_at,
                key_at + offset,
                product,
                comptime!(operand_codes(warp)),
            )
        } else {
            scores::<AS>(query_at, key_at + offset, product)
        };
        if comptime!(tiles.column_groups == 2) {
            s = summed::<AS>(s, roles, exchange, turn, tiles);
            turn = 1u32 - turn;
        }
        s = with_scales::<AS>(s, column_scales(scales.key, tiles), tiles);
        let made = weights::<F, NB, NS, NP, AS, AP>(
            s,
            column_scales(scales.value, tiles),
            states,
            block,
            &seen,
            rows,
            scoring,
            scale_log2,
            warp,
            kind,
        );
        states = made.states;
        o = rescaled_fragments::<AO>(o, &states, warp);
        await_copies(comptime!(2 * (tiles.stages - 1)));
        sync_plane();
        o = with_values::<AO, AP>(
            o,
            made.p,
            value_at + offset,
            seen.first.may_have_masked,
            warp,
            kind,
        );
        block = next;
        scales = next_scales;
        ahead = next_block_in_steps(tile, ahead + step, masking, groups, kind);
        page = page_of_block(&operands.pages, ahead, tiles, kind);
        stage = next_stage(stage, tiles);
    }
    MainloopOutput::<AO> { o, states }
}

/// The stage that follows `stage` in the warp's circular buffer. A stage holds one block of keys and values.
#[cube]
fn next_stage(stage: u32, #[comptime] tiles: MmaSplitNTiles) -> u32 {
    let is_last = stage == comptime!(tiles.stages as u32 - 1);
    select(is_last, 0u32, stage + 1u32)
}

/// Returns the stage before `stage` in the warp's circular buffer. The warp has already multiplied the block in this
/// earlier stage, and can therefore refill the earlier stage.
#[cube]
fn last_stage(stage: u32, #[comptime] tiles: MmaSplitNTiles) -> u32 {
    select(
        stage == 0u32,
        comptime!(tiles.stages as u32 - 1),
        stage - 1u32,
    )
}

/// Adds the partial dot products `q·k` of the two warps of a key group. Each of the two warps has summed over half of
/// the columns. Both warps add the same two partial sums, so both continue with equal scores.
///
/// Two exchange buffers alternate. Both warps pass a barrier between two writes to the same buffer, so no unread data
/// is overwritten.
#[cube]
fn summed<AS: Size>(
    s: Vector<f32, AS>,
    roles: &Roles,
    exchange: u32,
    turn: u32,
    #[comptime] tiles: MmaSplitNTiles,
) -> Vector<f32, AS> {
    let count = comptime!(tiles.vectors()[3]);
    let bytes = comptime!(tiles.exchange_bytes() as u32);
    let start = exchange_address(exchange) + turn * comptime!(tiles.warps() as u32) * bytes;
    store_registers::<AS>(start + roles.warp * bytes, s, 0usize, count);
    named_barrier(roles.key_group + 1u32, 64usize);
    let other = load_registers::<AS>(start + (roles.warp ^ 1u32) * bytes, count);
    s + other
}
