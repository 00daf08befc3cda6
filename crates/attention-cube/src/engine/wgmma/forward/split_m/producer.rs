//! The warpgroup that fetches: one thread of it keeps the ring full.

use crate::engine::wgmma::forward::copies::{Sources, Steps, copied_rows};
use crate::engine::wgmma::forward::scheduler::take_item;
use crate::engine::wgmma::plan::SplitMTiles;
use crate::fragment::scoring::Masking;
use crate::fragment::visits::next_block;
use crate::fragment::work_tile::{Tile, TileKind, TileScheduler, assigned_tile};
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_arrive, barrier_expect, barrier_expect_bytes, barrier_wait};
use cube_kit::hopper::tma::{load_columns, load_subtiles};
use cube_kit::hopper::{ROW_BYTES, is_whole};
use cubecl::prelude::*;

/// Where things are in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Places {
    pub queries: u32,
    pub keys: u32,
    pub values: u32,
    pub biases: u32,
    /// Where the output goes through.
    pub output: u32,
    /// Full and empty barriers of the stages of keys, of values, and the queries'.
    pub key_full: u32,
    pub key_empty: u32,
    pub value_full: u32,
    pub value_empty: u32,
    pub queries_full: u32,
    pub queries_empty: u32,
    /// Barriers at which all warps have told which keys they use.
    pub used_told: u32,
    /// Full and empty barriers of the stages of biases.
    pub bias_full: u32,
    pub bias_empty: u32,
    pub used: u32,
}

#[cube]
pub(super) fn places(start: u32, #[comptime] tiles: SplitMTiles) -> Places {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let each = comptime!(8 * tiles.stages as u32);
    Places {
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
        used_told: barriers + 4u32 * each + 16u32,
        bias_full: barriers + 4u32 * each + 40u32,
        bias_empty: barriers + 4u32 * each + comptime!(40 + 8 * tiles.bias_stages as u32),
        used: start + comptime!(tiles.used_at() as u32),
    }
}

/// Copies, turn by turn, the queries, and keys and values of every visited block in the order of their use.
#[cube]
pub(super) fn fetch(
    sources: &Sources,
    bias_map: u64,
    masking: &Masking,
    scheduler: &TileScheduler,
    places: &Places,
    notices: u32,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
) {
    let steps = &sources.steps;
    let mut item = CUBE_POS as u32;
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
                let stage = pipeline_state(count, tiles.stages);
                let full = places.key_full + 8u32 * stage.stage;
                barrier_wait(places.key_empty + 8u32 * stage.stage, stage.parity ^ 1u32);
                barrier_expect(full, comptime!(tiles.key_bytes()));
                load_subtiles(
                    places.keys + stage.stage * comptime!(tiles.key_bytes() as u32),
                    sources.key,
                    key_batch,
                    key_head,
                    block * comptime!(tiles.keys as i32),
                    full,
                    0usize,
                    comptime!(tiles.key_subtiles()),
                    comptime!(tiles.keys * ROW_BYTES),
                    comptime!(is_whole(tiles.head_dim)),
                );
                if count > first_count {
                    fetch_values(
                        sources.value,
                        steps,
                        places,
                        &tile,
                        previous,
                        count - 1u32,
                        tiles,
                    );
                } else {
                    // After the first keys: the last tile's queries may still be in use.
                    fetch_queries(sources.query, steps, places, &tile, tiles_done, tiles, kind);
                    // While these come, since the counter is far away.
                    next = take_item(scheduler, item, turn, masking, notices, kind);
                }
                if comptime!(tiles.bias_stages > 0) {
                    fetch_biases(bias_map, steps, places, &tile, block, count, tiles);
                }
                previous = block;
                block = next_block(&tile, block + 1i32, masking, kind);
                count += 1u32;
            }
            fetch_values(
                sources.value,
                steps,
                places,
                &tile,
                previous,
                count - 1u32,
                tiles,
            );
        } else {
            if assigned_tile.exists {
                // Its output may go through the queries' place: that is taken and given back for it, too. Neither side may be two
                // tiles ahead of the other, since a barrier tells a phase from the next alone.
                await_queries_empty(places, tiles_done);
                barrier_arrive(places.queries_full, 1u32);
            }
            next = take_item(scheduler, item, turn, masking, notices, kind);
        }
        tiles_done += u32::cast_from(assigned_tile.exists);
        item = next;
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
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
) {
    await_queries_empty(places, count);
    barrier_expect_bytes(
        places.queries_full,
        copied_rows(tile, comptime!(tiles.rows()), kind)
            * comptime!((tiles.key_subtiles() * ROW_BYTES) as u32),
    );
    load_subtiles(
        places.queries,
        map,
        tile.batch * steps.query_batch,
        tile.first_head,
        tile.first_query,
        places.queries_full,
        0usize,
        comptime!(tiles.key_subtiles()),
        comptime!(tiles.rows() * ROW_BYTES),
        comptime!(kind.heads == 1 && is_whole(tiles.head_dim)),
    );
}

/// Copies the values of the `count`-th visited block.
#[cube]
fn fetch_values(
    map: u64,
    steps: &Steps,
    places: &Places,
    tile: &Tile,
    block: i32,
    count: u32,
    #[comptime] tiles: SplitMTiles,
) {
    let slot = pipeline_state(count, tiles.stages);
    let full = places.value_full + 8u32 * slot.stage;
    barrier_wait(places.value_empty + 8u32 * slot.stage, slot.parity ^ 1u32);
    barrier_expect(full, comptime!(tiles.value_bytes()));
    load_subtiles(
        places.values + slot.stage * comptime!(tiles.value_bytes() as u32),
        map,
        tile.batch * steps.value_batch,
        tile.kv_head * steps.value_head,
        block * comptime!(tiles.keys as i32),
        full,
        0usize,
        comptime!(tiles.value_subtiles()),
        comptime!(tiles.keys * ROW_BYTES),
        comptime!(is_whole(tiles.value_dim)),
    );
}

/// Copies the biases of the `count`-th visited block.
#[cube]
fn fetch_biases(
    map: u64,
    steps: &Steps,
    places: &Places,
    tile: &Tile,
    block: i32,
    count: u32,
    #[comptime] tiles: SplitMTiles,
) {
    let slot = pipeline_state(count, tiles.bias_stages);
    let full = places.bias_full + 8u32 * slot.stage;
    barrier_wait(places.bias_empty + 8u32 * slot.stage, slot.parity ^ 1u32);
    barrier_expect(full, comptime!(tiles.bias_bytes()));
    load_columns(
        places.biases + slot.stage * comptime!(tiles.bias_bytes() as u32),
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
