//! The main loop of a warp over the blocks of keys and values that its tile sees.

use crate::engine::tensor_core::common::block_range::{next_block, tile_position};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::tile_scheduler::{Tile, TileKind};
use crate::engine::tensor_core::mma::forward::load::{HeadRows, Sources, copy_queries, copy_rows};
use crate::engine::tensor_core::mma::forward::warp::{
    ColumnScales, MainloopOutput, WarpRows, empty_states, rescaled_fragments, score_product,
    warp_views, weights, with_values,
};
use crate::engine::tensor_core::mma::plan::split_m::MmaSplitMTiles;
use cube_kit::ampere::cp_async::{await_copies, commit_copies};
use cube_kit::ampere::mma::{left_address, right_address, scores};
use cubecl::prelude::*;

/// Processes the blocks that a tile sees, from block `first` on. Shared memory starts at address `start`. `warp_row` is
/// the index in the tile of the warp's first row.
#[cube]
pub(super) fn run_mainloop<
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
    scale_log2: f32,
    #[comptime] tiles: MmaSplitMTiles,
    #[comptime] kind: TileKind,
) -> MainloopOutput<AO> {
    let masking = &scoring.masking;
    let offsets = SharedOffsets {
        keys: start + comptime!(tiles.keys_at() as u32),
        values: start + comptime!(tiles.values_at() as u32),
    };
    let head = HeadRows {
        batch: tile.batch,
        head: tile.kv_head,
        first: tile.keys.first,
        end: min(tile.keys.end, masking.seq_lens.kv_len),
    };
    let query_at = left_address(start, warp_row);
    let key_at = right_address(offsets.keys);
    let value_at = left_address(offsets.values, 0u32);
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
        copy_keys::<E>(sources, head, block, offsets, 0u32, tiles);
        copy_values::<E>(sources, head, block, offsets, 0u32, tiles);
        commit_copies();
    }
    while block < tile.end_block {
        let next = next_block(tile, block + 1i32, masking, kind);
        let other = 1u32 - stage;
        await_copies(0usize);
        sync_cube();
        if next < tile.end_block {
            copy_keys::<E>(sources, head, next, offsets, other, tiles);
            copy_values::<E>(sources, head, next, offsets, other, tiles);
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
            scale_log2,
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
    MainloopOutput::<AO> { o, states }
}

/// The shared-memory addresses of the keys and of the values. Keys and values each have two buffers: one for the
/// current block, and one for the next block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct SharedOffsets {
    keys: u32,
    values: u32,
}

/// Starts the copy of a block of keys.
#[cube]
fn copy_keys<E: Float>(
    sources: &Sources<E>,
    head: HeadRows,
    block: i32,
    offsets: SharedOffsets,
    stage: u32,
    #[comptime] tiles: MmaSplitMTiles,
) {
    copy_rows::<E>(
        sources.key,
        head,
        block * comptime!(tiles.keys as i32),
        offsets.keys + stage * comptime!(tiles.key_bytes() as u32),
        tiles.keys,
        tiles.head_dim,
        comptime!(tiles.units()),
    );
}

/// Starts the copy of a block of values.
#[cube]
fn copy_values<E: Float>(
    sources: &Sources<E>,
    head: HeadRows,
    block: i32,
    offsets: SharedOffsets,
    stage: u32,
    #[comptime] tiles: MmaSplitMTiles,
) {
    copy_rows::<E>(
        sources.value,
        head,
        block * comptime!(tiles.keys as i32),
        offsets.values + stage * comptime!(tiles.value_bytes() as u32),
        tiles.keys,
        tiles.value_dim,
        comptime!(tiles.units()),
    );
}
