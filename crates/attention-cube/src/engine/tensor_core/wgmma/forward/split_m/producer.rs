//! The producer warpgroup of the split-M forward. One of its threads copies the operands to shared memory by TMA.

use crate::engine::tensor_core::common::block_range::next_block;
use crate::engine::tensor_core::common::scoring::Masking;
use crate::engine::tensor_core::common::tile_scheduler::{
    Tile, TileKind, TileScheduler, assigned_tile, ordered_item,
};
use crate::engine::tensor_core::wgmma::forward::load::{Sources, Steps, copied_rows};
use crate::engine::tensor_core::wgmma::forward::pages::{load_rows, pages_of_rows};
use crate::engine::tensor_core::wgmma::forward::scheduler::take_item;
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitMTiles;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_arrive, barrier_expect, barrier_expect_bytes, barrier_wait};
use cube_kit::hopper::tma::{load_columns, load_subtiles};
use cube_kit::nvidia::{ROW_BYTES, is_whole};
use cubecl::prelude::*;

/// The shared memory addresses of the buffers and barriers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct SharedOffsets {
    pub queries: u32,
    pub keys: u32,
    pub values: u32,
    pub biases: u32,
    /// The address of the staging buffer from which TMA stores the output.
    pub output: u32,
    /// This field and the next five are addresses of barriers: the full and empty barriers of the stages of K, of the
    /// stages of V, and of the queries.
    pub key_full: u32,
    pub key_empty: u32,
    pub value_full: u32,
    pub value_empty: u32,
    pub queries_full: u32,
    pub queries_empty: u32,
    /// The address of three consecutive barriers, one for each of three blocks in flight. A barrier completes when all
    /// consumer warps have set the *used bits* of a block. Each used bit tells whether some row of the tile sees a
    /// certain key.
    pub used_ready: u32,
    /// This field and the next are addresses of barriers: the full and empty barriers of the stages of the biases.
    pub bias_full: u32,
    pub bias_empty: u32,
    pub used: u32,
}

#[cube]
pub(super) fn offsets(start: u32, #[comptime] tiles: WgmmaSplitMTiles) -> SharedOffsets {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let each = comptime!(8 * tiles.stages as u32);
    SharedOffsets {
        queries: start,
        keys: start + comptime!(tiles.keys_at() as u32),
        values: start + comptime!(tiles.values_at() as u32),
        biases: start + comptime!(tiles.biases_at() as u32),
        output: start + comptime!(tiles.output_at() as u32),
        key_full: barriers,
        key_empty: barriers + each,
        value_full: barriers + 2u32 * each,
        value_empty: barriers + 3u32 * each,
        queries_full: barriers + 4u32 * each,
        queries_empty: barriers + 4u32 * each + 8u32,
        used_ready: barriers + 4u32 * each + 16u32,
        bias_full: barriers + 4u32 * each + 40u32,
        bias_empty: barriers + 4u32 * each + comptime!(40 + 8 * tiles.bias_stages as u32),
        used: start + comptime!(tiles.used_at() as u32),
    }
}

/// Copies the queries of each tile, and the rows of K and V of every block. The copies come in the order in which the
/// consumers need the data.
#[cube]
pub(super) fn fetch(
    sources: &Sources,
    bias_map: u64,
    masking: &Masking,
    scheduler: &TileScheduler,
    offsets: &SharedOffsets,
    mailbox: u32,
    #[comptime] tiles: WgmmaSplitMTiles,
    #[comptime] kind: TileKind,
) {
    let steps = &sources.steps;
    let mut item = ordered_item(scheduler, CUBE_POS as u32, masking, kind);
    let mut turn = 0u32;
    let mut tiles_done = 0u32;
    let mut count = 0u32;
    while item < scheduler.schedule.items {
        let assigned_tile = assigned_tile(
            scheduler,
            item,
            turn,
            masking,
            comptime!(tiles.rows()),
            tiles.keys,
            kind,
        );
        let tile = assigned_tile.tile;
        let mut next = item;
        if assigned_tile.exists && assigned_tile.first < tile.end_block {
            let key_batch = tile.batch * steps.key_batch;
            let key_head = tile.kv_head * steps.key_head;
            let mut block = assigned_tile.first;
            let mut previous = block;
            let first_count = count;
            while block < tile.end_block {
                let first_key = block * comptime!(tiles.keys as i32);
                let pages = pages_of_rows(&sources.pages, tile.batch, first_key, tiles.keys, kind);
                let stage = pipeline_state(count, tiles.stages);
                let full = offsets.key_full + 8u32 * stage.stage;
                barrier_wait(offsets.key_empty + 8u32 * stage.stage, stage.parity ^ 1u32);
                barrier_expect(full, comptime!(tiles.key_bytes()));
                load_rows(
                    offsets.keys + stage.stage * comptime!(tiles.key_bytes() as u32),
                    sources.key,
                    key_batch,
                    pages,
                    steps.key_batch,
                    key_head,
                    first_key,
                    full,
                    0usize,
                    comptime!(tiles.key_subtiles()),
                    tiles.keys,
                    comptime!(is_whole(tiles.head_dim)),
                    kind,
                );
                if count > first_count {
                    fetch_values(sources, offsets, &tile, previous, count - 1u32, tiles, kind);
                } else {
                    // Copy the first keys before the queries, because the consumers may still read the queries of the
                    // previous tile.
                    fetch_queries(
                        sources.query,
                        steps,
                        offsets,
                        &tile,
                        tiles_done,
                        tiles,
                        kind,
                    );
                    // Take the next work item while the first copies are in flight, which hides the latency of the counter in
                    // global memory.
                    next = take_item(scheduler, item, turn, masking, mailbox, kind);
                }
                if comptime!(tiles.bias_stages > 0) {
                    fetch_biases(bias_map, steps, offsets, &tile, block, count, tiles);
                }
                previous = block;
                block = next_block(&tile, block + 1i32, masking, kind);
                count += 1u32;
            }
            fetch_values(sources, offsets, &tile, previous, count - 1u32, tiles, kind);
        } else {
            if assigned_tile.exists {
                // A tile without blocks needs no queries. The producer nevertheless waits until the buffer of the
                // queries is free, and signals that the buffer is full. Without these steps, producer and consumers
                // could be two tiles apart. Two phases of a barrier that are two tiles apart have the same parity, so a
                // wait could end too early.
                await_queries_empty(offsets, tiles_done);
                barrier_arrive(offsets.queries_full, 1u32);
            }
            next = take_item(scheduler, item, turn, masking, mailbox, kind);
        }
        tiles_done += u32::cast_from(assigned_tile.exists);
        item = next;
        turn += 1u32;
    }
}

/// Waits until the buffer of the queries is free for the `count`-th tile.
#[cube]
fn await_queries_empty(offsets: &SharedOffsets, count: u32) {
    barrier_wait(offsets.queries_empty, (count % 2u32) ^ 1u32);
}

/// Copies the queries of the `count`-th tile.
#[cube]
fn fetch_queries(
    map: u64,
    steps: &Steps,
    offsets: &SharedOffsets,
    tile: &Tile,
    count: u32,
    #[comptime] tiles: WgmmaSplitMTiles,
    #[comptime] kind: TileKind,
) {
    await_queries_empty(offsets, count);
    barrier_expect_bytes(
        offsets.queries_full,
        copied_rows(tile, comptime!(tiles.rows()), kind)
            * comptime!((tiles.key_subtiles() * ROW_BYTES) as u32),
    );
    load_subtiles(
        offsets.queries,
        map,
        tile.batch * steps.query_batch,
        tile.first_head,
        tile.first_query,
        offsets.queries_full,
        0usize,
        comptime!(tiles.key_subtiles()),
        comptime!(tiles.rows() * ROW_BYTES),
        comptime!(kind.heads == 1 && is_whole(tiles.head_dim)),
    );
}

/// Copies the rows of V of a block. `count` is the block's index among all blocks that the CTA processes.
#[cube]
fn fetch_values(
    sources: &Sources,
    offsets: &SharedOffsets,
    tile: &Tile,
    block: i32,
    count: u32,
    #[comptime] tiles: WgmmaSplitMTiles,
    #[comptime] kind: TileKind,
) {
    let steps = &sources.steps;
    let first_key = block * comptime!(tiles.keys as i32);
    let pages = pages_of_rows(&sources.pages, tile.batch, first_key, tiles.keys, kind);
    let slot = pipeline_state(count, tiles.stages);
    let full = offsets.value_full + 8u32 * slot.stage;
    barrier_wait(offsets.value_empty + 8u32 * slot.stage, slot.parity ^ 1u32);
    barrier_expect(full, comptime!(tiles.value_bytes()));
    load_rows(
        offsets.values + slot.stage * comptime!(tiles.value_bytes() as u32),
        sources.value,
        tile.batch * steps.value_batch,
        pages,
        steps.value_batch,
        tile.kv_head * steps.value_head,
        first_key,
        full,
        0usize,
        comptime!(tiles.value_subtiles()),
        tiles.keys,
        comptime!(is_whole(tiles.value_dim)),
        kind,
    );
}

/// Copies the biases of a block. `count` is the block's index among all blocks that the CTA processes.
#[cube]
fn fetch_biases(
    map: u64,
    steps: &Steps,
    offsets: &SharedOffsets,
    tile: &Tile,
    block: i32,
    count: u32,
    #[comptime] tiles: WgmmaSplitMTiles,
) {
    let slot = pipeline_state(count, tiles.bias_stages);
    let full = offsets.bias_full + 8u32 * slot.stage;
    barrier_wait(offsets.bias_empty + 8u32 * slot.stage, slot.parity ^ 1u32);
    barrier_expect(full, comptime!(tiles.bias_bytes()));
    load_columns(
        offsets.biases + slot.stage * comptime!(tiles.bias_bytes() as u32),
        map,
        tile.batch * steps.bias_batch,
        tile.first_head * steps.bias_head,
        tile.first_query,
        block as u32 * comptime!(tiles.keys as u32),
        full,
        comptime!(tiles.bias_subtiles()),
        comptime!(tiles.rows() * ROW_BYTES),
    );
}
