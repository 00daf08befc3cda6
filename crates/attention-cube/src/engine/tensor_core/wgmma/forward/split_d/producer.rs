//! The producer warpgroup of the split-D forward. One of its threads copies the operands to shared memory by TMA.

use crate::engine::tensor_core::common::block_range::next_block;
use crate::engine::tensor_core::common::scoring::Masking;
use crate::engine::tensor_core::common::tile_scheduler::{
    Tile, TileKind, TileScheduler, assigned_tile, ordered_item,
};
use crate::engine::tensor_core::wgmma::forward::load::{Sources, Steps, copied_rows};
use crate::engine::tensor_core::wgmma::forward::pages::{MOST_BOXES, load_rows, pages_of_rows};
use crate::engine::tensor_core::wgmma::forward::scheduler::take_item;
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitDTiles;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{
    barrier_arrive, barrier_expect, barrier_expect_bytes, barrier_wait, tma_prefetch_subtiles,
};
use cube_kit::hopper::tma::load_subtiles;
use cube_kit::nvidia::{ROW_BYTES, SUBTILE, is_whole};
use cubecl::prelude::*;

/// The shared memory addresses of the buffers and barriers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct SharedOffsets {
    pub queries: u32,
    pub stages: u32,
    pub probabilities: u32,
    pub exchange: u32,
    pub full: u32,
    pub empty: u32,
    pub queries_full: u32,
    pub queries_empty: u32,
    pub used: u32,
}

#[cube]
pub(super) fn offsets(start: u32, #[comptime] tiles: WgmmaSplitDTiles) -> SharedOffsets {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let each = comptime!(8 * tiles.stages as u32);
    SharedOffsets {
        queries: start,
        stages: start + comptime!(tiles.stages_at() as u32),
        probabilities: start + comptime!(tiles.probabilities_at() as u32),
        exchange: start + comptime!(tiles.exchange_at() as u32),
        full: barriers,
        empty: barriers + each,
        queries_full: barriers + 2u32 * each,
        queries_empty: barriers + 2u32 * each + 8u32,
        used: start + comptime!(tiles.used_at() as u32),
    }
}

/// Copies the queries of each tile, and the chunks of K and V of every block. The copies come in the order in which the
/// consumers need the data.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(super) fn fetch(
    sources: &Sources,
    masking: &Masking,
    scheduler: &TileScheduler,
    offsets: &SharedOffsets,
    mailbox: u32,
    #[comptime] tiles: WgmmaSplitDTiles,
    #[comptime] kind: TileKind,
) {
    let steps = &sources.steps;
    let mut item = ordered_item(scheduler, CUBE_POS as u32, masking, kind);
    let mut turn = 0u32;
    let mut tiles_done = 0u32;
    let mut passed = 0u32;
    while item < scheduler.schedule.items {
        let assigned_tile = assigned_tile(
            scheduler,
            item,
            turn,
            masking,
            WgmmaSplitDTiles::ROWS,
            WgmmaSplitDTiles::KEYS,
            kind,
        );
        let tile = assigned_tile.tile;
        if assigned_tile.exists && assigned_tile.first < tile.end_block {
            let mut block = assigned_tile.first;
            let mut previous = block;
            let mut is_first = true;
            while block < tile.end_block {
                if block + 1i32 < tile.end_block {
                    prefetch(sources, &tile, block + 1i32, tiles, kind);
                }
                let first_key = block * comptime!(WgmmaSplitDTiles::KEYS as i32);
                let pages = pages_of_rows(
                    &sources.pages,
                    tile.batch,
                    first_key,
                    WgmmaSplitDTiles::KEYS,
                    kind,
                );
                #[unroll]
                for part in 0..comptime!(tiles.key_chunks()) {
                    fetch_keys(
                        sources.key,
                        steps,
                        offsets,
                        &tile,
                        pages,
                        block,
                        passed + comptime!(part as u32),
                        part,
                        tiles,
                        kind,
                    );
                    // The consumers may still read the previous tile's queries, so copy the queries late. But copy them
                    // before the ring is full, because the consumers free no stage before the queries arrive. If the
                    // producer first waited for a free stage, it would wait forever.
                    if comptime!(part + 1 == tiles.stages.min(tiles.key_chunks())) {
                        if is_first {
                            fetch_queries(
                                sources.query,
                                steps,
                                offsets,
                                &tile,
                                tiles_done,
                                tiles,
                                kind,
                            );
                        }
                    }
                }
                passed += comptime!(tiles.key_chunks() as u32);
                if !is_first {
                    fetch_values(sources, offsets, &tile, previous, passed, tiles, kind);
                    passed += comptime!(tiles.value_chunks() as u32);
                }
                is_first = false;
                previous = block;
                block = next_block(&tile, block + 1i32, masking, kind);
            }
            fetch_values(sources, offsets, &tile, previous, passed, tiles, kind);
            passed += comptime!(tiles.value_chunks() as u32);
        } else if assigned_tile.exists {
            // A tile without blocks needs no queries. The producer nevertheless waits until the buffer of the queries
            // is free, and signals that the buffer is full. Without these steps, producer and consumers could be two
            // tiles apart. Two phases of a barrier that are two tiles apart have the same parity, so a wait could end
            // too early.
            await_queries_empty(offsets, tiles_done);
            barrier_arrive(offsets.queries_full, 1u32);
        }
        tiles_done += u32::cast_from(assigned_tile.exists);
        item = take_item(scheduler, item, turn, masking, mailbox, kind);
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
    #[comptime] tiles: WgmmaSplitDTiles,
    #[comptime] kind: TileKind,
) {
    await_queries_empty(offsets, count);
    barrier_expect_bytes(
        offsets.queries_full,
        copied_rows(tile, WgmmaSplitDTiles::ROWS, kind)
            * comptime!((tiles.key_chunks() * ROW_BYTES) as u32),
    );
    load_subtiles(
        offsets.queries,
        map,
        tile.batch * steps.query_batch,
        tile.first_head,
        tile.first_query,
        offsets.queries_full,
        0usize,
        comptime!(tiles.key_chunks()),
        comptime!(PRODUCT_ROWS * ROW_BYTES),
        comptime!(kind.heads == 1 && is_whole(tiles.head_dim)),
    );
}

/// Copies the `part`-th chunk (64 columns) of a block of K. `pages` holds the pages of the block's keys. `index` is the
/// number of chunks that the producer has copied so far.
#[cube]
fn fetch_keys(
    map: u64,
    steps: &Steps,
    offsets: &SharedOffsets,
    tile: &Tile,
    pages: Vector<u32, Const<MOST_BOXES>>,
    block: i32,
    index: u32,
    #[comptime] part: usize,
    #[comptime] tiles: WgmmaSplitDTiles,
    #[comptime] kind: TileKind,
) {
    let place = next_stage(offsets, index, tiles);
    barrier_expect(place.full, WgmmaSplitDTiles::STAGE_BYTES);
    load_rows(
        place.at,
        map,
        tile.batch * steps.key_batch,
        pages,
        steps.key_batch,
        tile.kv_head * steps.key_head,
        block * comptime!(WgmmaSplitDTiles::KEYS as i32),
        place.full,
        comptime!(part * SUBTILE),
        1usize,
        WgmmaSplitDTiles::KEYS,
        comptime!(is_whole(tiles.head_dim)),
        kind,
    );
}

/// Prefetches one chunk of K and one chunk of V of a block to the L2 cache. CTAs with neighboring tiles need the same
/// block at about the same time. Each of these CTAs prefetches different chunks of the block, so one chunk of K and one
/// chunk of V per CTA suffice. The function does not prefetch a chunk that TMA cannot copy as one box, and no pages.
#[cube]
fn prefetch(
    sources: &Sources,
    tile: &Tile,
    block: i32,
    #[comptime] tiles: WgmmaSplitDTiles,
    #[comptime] kind: TileKind,
) {
    let steps = &sources.steps;
    let row = block * comptime!(WgmmaSplitDTiles::KEYS as i32);
    let turn = tile.first_query as u32 / comptime!(WgmmaSplitDTiles::ROWS as u32);
    if comptime!(kind.page_len == 0 && is_whole(tiles.head_dim)) {
        tma_prefetch_subtiles(
            sources.key,
            tile.batch * steps.key_batch,
            tile.kv_head * steps.key_head,
            row,
            turn % comptime!(tiles.key_chunks() as u32),
        );
    }
    if comptime!(kind.page_len == 0 && tiles.has_whole_values()) {
        let part = turn % comptime!(tiles.value_chunks() as u32);
        let warpgroups = comptime!(WgmmaSplitDTiles::WARPGROUPS as u32);
        tma_prefetch_subtiles(
            sources.value,
            tile.batch * steps.value_batch,
            tile.kv_head * steps.value_head,
            row + (part / warpgroups * comptime!(WgmmaSplitDTiles::VALUE_KEYS as u32)) as i32,
            part % warpgroups * comptime!(tiles.value_subtiles() as u32),
        );
    }
}

/// A free stage of the ring: the address of its buffer, and its full barrier.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct FreeStage {
    at: u32,
    full: u32,
}

/// Waits until the ring stage for chunk number `index` is free, and returns that stage. `index` counts all chunks that
/// the CTA has copied, over all blocks.
#[cube]
fn next_stage(
    offsets: &SharedOffsets,
    index: u32,
    #[comptime] tiles: WgmmaSplitDTiles,
) -> FreeStage {
    let chunk = pipeline_state(index, tiles.stages);
    barrier_wait(offsets.empty + 8u32 * chunk.stage, chunk.parity ^ 1u32);
    FreeStage {
        at: offsets.stages + chunk.stage * comptime!(WgmmaSplitDTiles::STAGE_BYTES as u32),
        full: offsets.full + 8u32 * chunk.stage,
    }
}

/// Copies all chunks of V of a block. `passed` is the number of chunks that the producer has copied so far.
#[cube]
fn fetch_values(
    sources: &Sources,
    offsets: &SharedOffsets,
    tile: &Tile,
    block: i32,
    passed: u32,
    #[comptime] tiles: WgmmaSplitDTiles,
    #[comptime] kind: TileKind,
) {
    let steps = &sources.steps;
    let batch = tile.batch * steps.value_batch;
    let head = tile.kv_head * steps.value_head;
    #[unroll]
    for part in 0..comptime!(tiles.value_chunks()) {
        let first_column = comptime!(part % WgmmaSplitDTiles::WARPGROUPS * tiles.value_columns());
        let first_row =
            comptime!((part / WgmmaSplitDTiles::WARPGROUPS * WgmmaSplitDTiles::VALUE_KEYS) as i32);
        let first_key = block * comptime!(WgmmaSplitDTiles::KEYS as i32) + first_row;
        let pages = pages_of_rows(
            &sources.pages,
            tile.batch,
            first_key,
            WgmmaSplitDTiles::VALUE_KEYS,
            kind,
        );
        let place = next_stage(offsets, passed + comptime!(part as u32), tiles);
        barrier_expect(place.full, comptime!(tiles.value_bytes()));
        load_rows(
            place.at,
            sources.value,
            batch,
            pages,
            steps.value_batch,
            head,
            first_key,
            place.full,
            first_column,
            comptime!(tiles.value_subtiles()),
            WgmmaSplitDTiles::VALUE_KEYS,
            comptime!(tiles.has_whole_values()),
            kind,
        );
    }
}
