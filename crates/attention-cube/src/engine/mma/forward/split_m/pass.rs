//! A warp's pass over the blocks that its tile visits.

use crate::engine::mma::forward::copies::{HeadRows, Sources, copy_queries, copy_rows};
use crate::engine::mma::forward::warp::{
    Attended, ColumnScales, WarpRows, empty_states, rescaled_fragments, score_product, warp_views,
    weights, with_values,
};
use crate::engine::mma::plan::split_m::SplitMTiles;
use crate::fragment::scoring::Scoring;
use crate::fragment::visits::{next_block, tile_position};
use crate::fragment::work_tile::{Tile, TileKind};
use cube_kit::ampere::copy::{await_copies, commit_copies};
use cube_kit::ampere::product::{left_address, right_address, scores};
use cubecl::prelude::*;

/// Visits a tile's blocks from the `first` on. Shared memory is the cube's from `start` on, the warp's rows are the tile's from
/// `warp_row` on.
#[cube]
pub(super) fn attend<
    E: Float,
    F: Float,
    NB: Size,
    NS: Size,
    NP: Size,
    AS: Size,
    AP: Size,
    AO: Size,
>(
    sources: &Sources<E>,
    tile: &Tile,
    first: i32,
    rows: &WarpRows,
    scoring: &Scoring<F, NB>,
    start: u32,
    warp_row: u32,
    power: f32,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
) -> Attended<AO> {
    let masking = &scoring.masking;
    let places = Places {
        keys: start + comptime!(tiles.keys_at() as u32),
        values: start + comptime!(tiles.values_at() as u32),
    };
    let head = HeadRows {
        batch: tile.batch,
        head: tile.kv_head,
        first: tile.keys.first,
        end: min(tile.keys.end, masking.extent.kv_len),
    };
    let query_at = left_address(start, warp_row);
    let key_at = right_address(places.keys);
    let value_at = left_address(places.values, 0u32);
    let position = tile_position(tile);
    let hidden = scoring.arguments.negative_infinity;
    let mut o = Vector::<f32, AO>::zeroed();
    let mut states = empty_states(hidden);
    let mut block = first;
    let mut stage = 0u32;
    if block < tile.end_block {
        copy_queries::<E>(
            sources.query,
            tile,
            start,
            comptime!(tiles.rows()),
            tiles.head_dim,
            comptime!(tiles.units()),
            kind,
        );
        copy_keys::<E>(sources, head, block, places, 0u32, tiles);
        copy_values::<E>(sources, head, block, places, 0u32, tiles);
        commit_copies();
    }
    while block < tile.end_block {
        let next = next_block(tile, block + 1i32, masking, kind);
        let other = 1u32 - stage;
        await_copies(0usize);
        sync_cube();
        if next < tile.end_block {
            copy_keys::<E>(sources, head, next, places, other, tiles);
            copy_values::<E>(sources, head, next, places, other, tiles);
        }
        commit_copies();
        let key_block = key_at + stage * comptime!(tiles.key_bytes() as u32);
        let value_block = value_at + stage * comptime!(tiles.value_bytes() as u32);
        let seen = warp_views(
            &position,
            rows,
            block,
            masking,
            comptime!(tiles.warp()),
            kind,
        );
        let s = scores::<AS>(
            query_at,
            key_block,
            comptime!(score_product(tiles.warp(), tiles.rows())),
        );
        let made = weights::<F, NB, NS, NP, AS, AP>(
            s,
            ColumnScales::zeroed(),
            states,
            block,
            &seen,
            rows,
            scoring,
            power,
            comptime!(tiles.warp()),
            kind,
        );
        states = made.states;
        o = rescaled_fragments::<AO>(o, &states, comptime!(tiles.warp()));
        o = with_values::<AO, AP>(
            o,
            made.p,
            value_block,
            seen.first.may_have_masked,
            comptime!(tiles.warp()),
            kind,
        );
        block = next;
        stage = other;
    }
    Attended::<AO> { o, states }
}

/// Where the stages start in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Places {
    keys: u32,
    values: u32,
}

/// Starts to copy a block of keys.
#[cube]
fn copy_keys<E: Float>(
    sources: &Sources<E>,
    head: HeadRows,
    block: i32,
    places: Places,
    stage: u32,
    #[comptime] tiles: SplitMTiles,
) {
    copy_rows::<E>(
        sources.key,
        head,
        block * comptime!(tiles.keys as i32),
        places.keys + stage * comptime!(tiles.key_bytes() as u32),
        tiles.keys,
        tiles.head_dim,
        comptime!(tiles.units()),
    );
}

/// Starts to copy a block of values.
#[cube]
fn copy_values<E: Float>(
    sources: &Sources<E>,
    head: HeadRows,
    block: i32,
    places: Places,
    stage: u32,
    #[comptime] tiles: SplitMTiles,
) {
    copy_rows::<E>(
        sources.value,
        head,
        block * comptime!(tiles.keys as i32),
        places.values + stage * comptime!(tiles.value_bytes() as u32),
        tiles.keys,
        tiles.value_dim,
        comptime!(tiles.units()),
    );
}
