//! A warp's pass over the blocks that its tile visits.

use super::softmax::{WarpStates, probabilities_of, rescaled_fragments};
use crate::engine::mma::forward::copies::{HeadRows, Sources, copy_queries, copy_rows};
use crate::engine::mma::fragments::{fragment_of, used_by_warp};
use crate::engine::mma::plan::split_m::SplitMTiles;
use crate::fragment::RowPair;
use crate::fragment::scoring::Scoring;
use crate::fragment::softmax::empty_state;
use crate::fragment::view::{View, view};
use crate::fragment::visits::{next_block, tile_position};
use crate::fragment::work_tile::{Tile, TileKind};
use cube_kit::ampere::copy::{await_copies, commit_copies};
use cube_kit::ampere::product::{Scores, Sums, add_product, left_address, right_address, scores};
use cubecl::prelude::*;

/// The rows of a warp's two fragments; where it has one, the second's are not used.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpRows {
    pub first: RowPair,
    pub second: RowPair,
}

/// What a warp's rows have of their blocks.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Attended<AO: Size> {
    pub o: Vector<f32, AO>,
    pub states: WarpStates,
}

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
    let mut states = WarpStates {
        first: empty_state(hidden),
        second: empty_state(hidden),
    };
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
        // Asked for before the scores are there: the mask's words come while these are computed.
        let seen_0 = view(
            &position,
            &rows.first,
            block,
            0u32,
            masking,
            tiles.keys,
            tiles.keys,
            kind,
        );
        let seen_1 = if comptime!(tiles.fragments == 2) {
            view(
                &position,
                &rows.second,
                block,
                0u32,
                masking,
                tiles.keys,
                tiles.keys,
                kind,
            )
        } else {
            seen_0
        };
        let s = scores::<AS>(query_at, key_block, comptime!(score_product(tiles)));
        let mut p = Vector::<u32, AP>::zeroed();
        #[unroll]
        for fragment in 0..tiles.fragments {
            let before = if comptime!(fragment == 0) {
                states.first
            } else {
                states.second
            };
            let own_rows = if comptime!(fragment == 0) {
                rows.first
            } else {
                rows.second
            };
            let own_seen: View = if comptime!(fragment == 0) {
                seen_0
            } else {
                seen_1
            };
            let made = probabilities_of::<F, NB, NS, NP>(
                fragment_of::<AS, NS>(s, fragment),
                before,
                block,
                &own_seen,
                &own_rows,
                scoring,
                power,
                tiles,
                kind,
            );
            if comptime!(fragment == 0) {
                states.first = made.state;
            } else {
                states.second = made.state;
            }
            #[unroll]
            for i in 0..comptime!(tiles.keys / 4) {
                p.insert(comptime!(fragment * tiles.keys / 4 + i), made.p.extract(i));
            }
        }
        o = rescaled_fragments::<AO>(o, &states, tiles);
        o = with_values::<AO, AP>(o, p, value_block, seen_0.may_have_masked, tiles, kind);
        block = next;
        stage = other;
    }
    Attended::<AO> { o, states }
}

/// O with a block's values.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
fn with_values<AO: Size, AP: Size>(
    o: Vector<f32, AO>,
    p: Vector<u32, AP>,
    values: u32,
    may_have_masked: bool,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AO> {
    let product = comptime!(sum_product(tiles, false));
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            let used = used_by_warp::<AP>(p, tiles.keys, tiles.fragments);
            add_product::<AO, AP>(o, p, values, used, comptime!(sum_product(tiles, true)))
        } else {
            add_product::<AO, AP>(o, p, values, 0u32, product)
        }
    } else {
        add_product::<AO, AP>(o, p, values, 0u32, product)
    }
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

/// The product that makes S.
const fn score_product(tiles: SplitMTiles) -> Scores {
    Scores {
        fragments: tiles.fragments,
        columns: tiles.keys,
        depth: tiles.head_dim,
        left_rows: tiles.rows(),
        right_rows: tiles.keys,
        half: tiles.half,
    }
}

/// The product that adds to O.
const fn sum_product(tiles: SplitMTiles, masked: bool) -> Sums {
    Sums {
        fragments: tiles.fragments,
        columns: tiles.value_columns(),
        depth: tiles.keys,
        right_rows: tiles.keys,
        masked,
        half: tiles.half,
    }
}
