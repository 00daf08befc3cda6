//! The warpgroup that fetches: one thread of it keeps the ring full.

use crate::engine::wgmma::forward::copies::{Sources, Steps, copied_rows};
use crate::engine::wgmma::forward::scheduler::take_item;
use crate::engine::wgmma::plan::SplitDTiles;
use crate::fragment::scoring::Masking;
use crate::fragment::visits::next_block;
use crate::fragment::work_tile::{Tile, TileKind, TileScheduler, assigned_tile};
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{
    barrier_arrive, barrier_expect, barrier_expect_bytes, barrier_wait, tma_prefetch_subtiles,
};
use cube_kit::hopper::tma::load_subtiles;
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES, SUBTILE, is_whole};
use cubecl::prelude::*;

/// Where things are in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Places {
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
pub(super) fn places(start: u32, #[comptime] tiles: SplitDTiles) -> Places {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let each = comptime!(8 * tiles.stages as u32);
    Places {
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

/// Copies, turn by turn, the queries, and the chunks of keys and values of every visited block in the order of
/// their use.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn fetch(
    sources: &Sources,
    masking: &Masking,
    scheduler: &TileScheduler,
    places: &Places,
    notices: u32,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) {
    let steps = &sources.steps;
    let mut item = CUBE_POS as u32;
    let mut turn = 0u32;
    let mut tiles_done = 0u32;
    let mut passed = 0u32;
    while item < scheduler.schedule.items {
        let assigned_tile = assigned_tile(
            scheduler,
            item,
            turn,
            masking,
            SplitDTiles::ROWS,
            SplitDTiles::KEYS,
            kind,
        );
        let tile = assigned_tile.tile;
        if assigned_tile.exists && assigned_tile.first < tile.end_block {
            let mut block = assigned_tile.first;
            let mut previous = block;
            let mut is_first = true;
            while block < tile.end_block {
                if block + 1i32 < tile.end_block {
                    prefetch(
                        sources.key,
                        sources.value,
                        steps,
                        &tile,
                        block + 1i32,
                        tiles,
                    );
                }
                #[unroll]
                for part in 0..comptime!(tiles.key_chunks()) {
                    fetch_keys(
                        sources.key,
                        steps,
                        places,
                        &tile,
                        block,
                        passed + comptime!(part as u32),
                        part,
                        tiles,
                    );
                    // As late as may be, since the last tile's queries may still be in use. But without
                    // them no stage becomes free.
                    if comptime!(part + 1 == tiles.stages.min(tiles.key_chunks())) {
                        if is_first {
                            fetch_queries(
                                sources.query,
                                steps,
                                places,
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
                    fetch_values(sources.value, steps, places, &tile, previous, passed, tiles);
                    passed += comptime!(tiles.value_chunks() as u32);
                }
                is_first = false;
                previous = block;
                block = next_block(&tile, block + 1i32, masking, kind);
            }
            fetch_values(sources.value, steps, places, &tile, previous, passed, tiles);
            passed += comptime!(tiles.value_chunks() as u32);
        } else if assigned_tile.exists {
            // Its output may go through the queries' place: that is taken and given back for it, too. Neither side may be two
            // tiles ahead of the other, since a barrier tells a phase from the next alone.
            await_queries_empty(places, tiles_done);
            barrier_arrive(places.queries_full, 1u32);
        }
        tiles_done += u32::cast_from(assigned_tile.exists);
        item = take_item(scheduler, item, turn, masking, notices, kind);
        turn += 1u32;
    }
}

/// Waits until what was before the `count`-th tile is done with the queries' place.
#[cube]
fn await_queries_empty(places: &Places, count: u32) {
    barrier_wait(places.queries_empty, (count % 2u32) ^ 1u32);
}

/// Copies the queries of the `count`-th tile.
#[cube]
fn fetch_queries(
    map: u64,
    steps: &Steps,
    places: &Places,
    tile: &Tile,
    count: u32,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) {
    await_queries_empty(places, count);
    barrier_expect_bytes(
        places.queries_full,
        copied_rows(tile, SplitDTiles::ROWS, kind)
            * comptime!((tiles.key_chunks() * ROW_BYTES) as u32),
    );
    load_subtiles(
        places.queries,
        map,
        tile.batch * steps.query_batch,
        tile.first_head,
        tile.first_query,
        places.queries_full,
        0usize,
        comptime!(tiles.key_chunks()),
        comptime!(PRODUCT_ROWS * ROW_BYTES),
        comptime!(kind.heads == 1 && is_whole(tiles.head_dim)),
    );
}

/// Copies the `part`-th chunk of a block's keys, which is the `index`-th of all.
#[cube]
fn fetch_keys(
    map: u64,
    steps: &Steps,
    places: &Places,
    tile: &Tile,
    block: i32,
    index: u32,
    #[comptime] part: usize,
    #[comptime] tiles: SplitDTiles,
) {
    let place = next_stage(places, index, tiles);
    barrier_expect(place.full, SplitDTiles::STAGE_BYTES);
    load_subtiles(
        place.at,
        map,
        tile.batch * steps.key_batch,
        tile.kv_head * steps.key_head,
        block * comptime!(SplitDTiles::KEYS as i32),
        place.full,
        comptime!(part * SUBTILE),
        1usize,
        SplitDTiles::STAGE_BYTES,
        comptime!(is_whole(tiles.head_dim)),
    );
}

/// Asks for a chunk of keys and one of values of a block that is needed soon. The cubes whose tiles are
/// neighbours read the same keys at about the same time, so each asks for another chunk.
#[cube]
fn prefetch(
    key_map: u64,
    value_map: u64,
    steps: &Steps,
    tile: &Tile,
    block: i32,
    #[comptime] tiles: SplitDTiles,
) {
    let row = block * comptime!(SplitDTiles::KEYS as i32);
    let turn = tile.first_query as u32 / comptime!(SplitDTiles::ROWS as u32);
    if comptime!(is_whole(tiles.head_dim)) {
        tma_prefetch_subtiles(
            key_map,
            tile.batch * steps.key_batch,
            tile.kv_head * steps.key_head,
            row,
            turn % comptime!(tiles.key_chunks() as u32),
        );
    }
    if comptime!(tiles.has_whole_values()) {
        let part = turn % comptime!(tiles.value_chunks() as u32);
        let warpgroups = comptime!(SplitDTiles::WARPGROUPS as u32);
        tma_prefetch_subtiles(
            value_map,
            tile.batch * steps.value_batch,
            tile.kv_head * steps.value_head,
            row + (part / warpgroups * comptime!(SplitDTiles::VALUE_KEYS as u32)) as i32,
            part % warpgroups * comptime!(tiles.value_subtiles() as u32),
        );
    }
}

/// A free stage.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct FreeStage {
    at: u32,
    full: u32,
}

/// Waits for the stage of the `index`-th chunk.
#[cube]
fn next_stage(places: &Places, index: u32, #[comptime] tiles: SplitDTiles) -> FreeStage {
    let chunk = pipeline_state(index, tiles.stages);
    barrier_wait(places.empty + 8u32 * chunk.stage, chunk.parity ^ 1u32);
    FreeStage {
        at: places.stages + chunk.stage * comptime!(SplitDTiles::STAGE_BYTES as u32),
        full: places.full + 8u32 * chunk.stage,
    }
}

/// Copies the values of a block, whose first chunk is `passed`.
#[cube]
fn fetch_values(
    map: u64,
    steps: &Steps,
    places: &Places,
    tile: &Tile,
    block: i32,
    passed: u32,
    #[comptime] tiles: SplitDTiles,
) {
    let batch = tile.batch * steps.value_batch;
    let head = tile.kv_head * steps.value_head;
    #[unroll]
    for part in 0..comptime!(tiles.value_chunks()) {
        let place = next_stage(places, passed + comptime!(part as u32), tiles);
        barrier_expect(place.full, comptime!(tiles.value_bytes()));
        let first_column = comptime!(part % SplitDTiles::WARPGROUPS * tiles.value_columns());
        let first_row =
            comptime!((part / SplitDTiles::WARPGROUPS * SplitDTiles::VALUE_KEYS) as i32);
        load_subtiles(
            place.at,
            map,
            batch,
            head,
            block * comptime!(SplitDTiles::KEYS as i32) + first_row,
            place.full,
            first_column,
            comptime!(tiles.value_subtiles()),
            comptime!(SplitDTiles::VALUE_KEYS * ROW_BYTES),
            comptime!(tiles.has_whole_values()),
        );
    }
}
