//! A cube passes over a tile's blocks.

use super::Places;
use super::chunks::{Operands, Pass, fill};
use super::roles::Roles;
use super::weights::{score_fragment, share, shared_probabilities, tell_maxima, told_used, weigh};
use crate::engine::mma::fragments::told_rows;
use crate::engine::mma::plan::split_d::SplitDTiles;
use crate::engine::mma::ring::{Place, Turn, await_full, place_of, tell_empty, turn_after};
use crate::fragment::RowPair;
use crate::fragment::bias::BiasWords;
use crate::fragment::score::score;
use crate::fragment::scoring::Scoring;
use crate::fragment::softmax::{SoftmaxState, empty_state};
use crate::fragment::view::{View, view};
use crate::fragment::visits::{next_block, tile_position};
use crate::fragment::work_tile::{AssignedTile, Tile, TileKind};
use cube_kit::ampere::barriers::{arrive_as_warp, await_phase};
use cube_kit::ampere::product::{
    Scores, SharedSums, add_scores, add_shared_product, left_address, right_address, scores,
    turn_address,
};
use cube_kit::ampere::{BARRIER_BYTES, FRAGMENT_ROWS};
use cube_kit::hopper::ROW_BYTES;
use cube_kit::hopper::SUBTILE;
use cube_kit::hopper::ptx::load_shared;
use cubecl::prelude::*;

/// A row group's barriers, behind its first: all its warps have told their maxima; all have shared P; all have multiplied by it.
const TOLD: u32 = 0;
const SHARED: u32 = BARRIER_BYTES as u32;
const MULTIPLIED: u32 = 2 * BARRIER_BYTES as u32;

/// What a warp has of a tile: its part of the output, and how far the rows of its scores are.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Attended<AO: Size> {
    pub o: Vector<f32, AO>,
    pub state_0: SoftmaxState,
    pub state_1: SoftmaxState,
}

/// Visits a tile's blocks. The copies of the queries have been started; the first chunk is full once these are there, too.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn attend<E: Float, F: Float, NB: Size, NS: Size, AS: Size, AO: Size>(
    assigned: &AssignedTile,
    query: &Tensor<E>,
    rows_0: &RowPair,
    rows_1: &RowPair,
    scoring: &Scoring<F, NB>,
    operands: &Operands,
    places: &Places,
    roles: &Roles,
    power: f32,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) -> Attended<AO> {
    let masking = &scoring.masking;
    let tile = &assigned.tile;
    let end = tile.end_block;
    let position = tile_position(tile);
    let hidden = scoring.arguments.negative_infinity;
    // The thread's first row of its warp's scores.
    let row = roles.score_row + UNIT_POS % 32u32 / 4u32;
    // Of two warps that share a scheduler, one makes its part of P before it multiplies by the first values, the other after.
    let weighs_first = roles.warp < comptime!(SplitDTiles::WARPS as u32 / 2);
    let mut o = Vector::<f32, AO>::zeroed();
    let mut state_0 = empty_state(hidden);
    let mut state_1 = empty_state(hidden);
    let mut may_have_masked = false.runtime();
    let mut values = end;
    let mut keys = assigned.first;
    let mut slot = 0u32;
    let mut ring_parity = 0u32;
    let mut parity = 0u32;
    if keys < end {
        let pass = Pass {
            values,
            keys,
            after: end,
            first: Turn {
                slot,
                parity: ring_parity,
            },
        };
        #[unroll]
        for chunk in 0..comptime!(tiles.slots - 1) {
            fill::<E>(operands, query, tile, &pass, chunk, tiles, kind);
        }
    }
    while keys < end || values < end {
        let pass = Pass {
            values,
            keys,
            after: next_block(tile, keys + 1i32, masking, kind),
            first: Turn {
                slot,
                parity: ring_parity,
            },
        };
        let has_keys = keys < end;
        let has_values = values < end;
        let seen_block = min(keys, end - 1i32);
        let seen_0 = view(
            &position,
            rows_0,
            seen_block,
            roles.key_group,
            masking,
            tiles.keys,
            SplitDTiles::SCORE_KEYS,
            kind,
        );
        let seen_1 = if comptime!(tiles.score_fragments() == 2) {
            view(
                &position,
                rows_1,
                seen_block,
                roles.key_group,
                masking,
                tiles.keys,
                SplitDTiles::SCORE_KEYS,
                kind,
            )
        } else {
            seen_0
        };
        let mut s = Vector::<f32, AS>::zeroed();
        #[unroll]
        for chunk in 0..tiles.key_chunks() {
            let place = await_chunk(operands, &pass, chunk, tiles);
            if has_keys {
                s = scores_of_chunk::<AS>(s, &place, places, roles, chunk, tiles);
            }
            leave_chunk::<E>(operands, query, tile, &pass, &place, chunk, tiles, kind);
        }
        let mut used = 0u32;
        if has_values {
            // P of the last block is there, and what became of its rows' references.
            await_phase(places.meetings + SHARED, parity ^ 1u32);
            if comptime!(kind.leaves_masked()) {
                used = told_used(places, roles, parity ^ 1u32, tiles);
            }
            o = rescaled_output::<AO>(o, places, roles, tiles);
        }
        if has_keys {
            let first_key = keys * comptime!(tiles.keys as i32)
                + (roles.key_group * comptime!(SplitDTiles::SCORE_KEYS as u32)) as i32;
            s = scored::<F, NB, NS, AS>(s, 0usize, first_key, &seen_0, rows_0, scoring, kind);
            tell_maxima::<NS>(
                score_fragment::<AS, NS>(s, 0usize),
                state_0.row_max.reference,
                row,
                places,
                roles,
                tiles,
            );
            if comptime!(tiles.score_fragments() == 2) {
                s = scored::<F, NB, NS, AS>(s, 1usize, first_key, &seen_1, rows_1, scoring, kind);
                tell_maxima::<NS>(
                    score_fragment::<AS, NS>(s, 1usize),
                    state_1.row_max.reference,
                    row + comptime!(FRAGMENT_ROWS as u32),
                    places,
                    roles,
                    tiles,
                );
            }
            // What the last block's factors were, the warp has read: others may write the next.
            sync_plane();
            arrive_as_warp(places.meetings + TOLD);
        }
        #[unroll]
        for chunk in 0..tiles.value_chunks() {
            let index = comptime!(tiles.key_chunks() + chunk);
            let place = await_chunk(operands, &pass, index, tiles);
            if comptime!(chunk == 0) {
                if has_keys && weighs_first {
                    await_phase(places.meetings + TOLD, parity);
                    let weighed = weigh::<NS, AS>(
                        s, state_0, state_1, row, places, roles, power, hidden, tiles,
                    );
                    s = weighed.pairs;
                    state_0 = weighed.state_0;
                    state_1 = weighed.state_1;
                }
            }
            if has_values {
                o = with_chunk::<AO>(
                    o,
                    &place,
                    shared_probabilities(places, parity ^ 1u32, tiles),
                    roles,
                    may_have_masked,
                    used,
                    chunk,
                    tiles,
                    kind,
                );
            }
            leave_chunk::<E>(operands, query, tile, &pass, &place, index, tiles, kind);
            if comptime!(chunk == 0) {
                if has_keys && !weighs_first {
                    await_phase(places.meetings + TOLD, parity);
                    let weighed = weigh::<NS, AS>(
                        s, state_0, state_1, row, places, roles, power, hidden, tiles,
                    );
                    s = weighed.pairs;
                    state_0 = weighed.state_0;
                    state_1 = weighed.state_1;
                }
            }
        }
        if has_keys {
            if comptime!(tiles.shares == 1) {
                // The next P takes the place of the last one. Of two places, all were done with the older when they told their maxima.
                arrive_as_warp(places.meetings + MULTIPLIED);
                await_phase(places.meetings + MULTIPLIED, parity);
            }
            share::<AS>(s, places, roles, parity, tiles, kind);
            sync_plane();
            arrive_as_warp(places.meetings + SHARED);
        }
        may_have_masked = seen_0.may_have_masked;
        values = keys;
        keys = pass.after;
        let turn = turn_after(
            &pass.first,
            comptime!(tiles.chunks()),
            comptime!(tiles.ring()),
        );
        slot = turn.slot;
        ring_parity = turn.parity;
        parity ^= 1u32;
    }
    Attended::<AO> {
        o,
        state_0,
        state_1,
    }
}

/// Waits until a chunk is there.
#[cube]
fn await_chunk(
    operands: &Operands,
    pass: &Pass,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
) -> Place {
    let place = place_of(operands.start, &pass.first, chunk, comptime!(tiles.ring()));
    await_full(&place);
    place
}

/// Gives a chunk back that has been read, and fills the slot of the one before it, which the others are likely to be done with.
#[cube]
fn leave_chunk<E: Float>(
    operands: &Operands,
    query: &Tensor<E>,
    tile: &Tile,
    pass: &Pass,
    place: &Place,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) {
    tell_empty(place);
    let next = comptime!(chunk + tiles.slots - 1);
    fill::<E>(operands, query, tile, pass, next, tiles, kind);
}

/// The dots of a warp's rows and keys with those of a chunk's columns.
#[cube]
fn scores_of_chunk<AS: Size>(
    s: Vector<f32, AS>,
    place: &Place,
    places: &Places,
    roles: &Roles,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
) -> Vector<f32, AS> {
    let subtiles = comptime!(chunk * tiles.key_columns / SUBTILE);
    let queries = if comptime!(tiles.holds_queries) {
        places.queries + comptime!((subtiles * tiles.rows * ROW_BYTES) as u32)
    } else {
        place.slot + comptime!(tiles.chunk_queries_at() as u32)
    };
    let left = left_address(queries, roles.score_row);
    let right = right_address(
        place.slot + roles.key_group * comptime!((SplitDTiles::SCORE_KEYS * ROW_BYTES) as u32),
    );
    let product = comptime!(Scores {
        fragments: tiles.score_fragments(),
        columns: SplitDTiles::SCORE_KEYS,
        depth: tiles.chunk_columns(chunk),
        left_rows: tiles.rows,
        right_rows: tiles.keys,
        half: tiles.half,
    });
    if comptime!(chunk == 0) {
        scores::<AS>(left, right, product)
    } else {
        add_scores::<AS>(s, left, right, product)
    }
}

/// The scores of one of a warp's fragments in place of its dots.
#[cube]
fn scored<F: Float, NB: Size, NS: Size, AS: Size>(
    dots: Vector<f32, AS>,
    #[comptime] fragment: usize,
    first_key: i32,
    seen: &View,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    #[comptime] kind: TileKind,
) -> Vector<f32, AS> {
    let own = score::<F, NB, NS>(
        score_fragment::<AS, NS>(dots, fragment),
        first_key,
        seen,
        rows,
        BiasWords::zeroed(),
        scoring,
        SplitDTiles::SCORE_KEYS,
        kind.fragment,
    );
    let mut s = dots;
    #[unroll]
    for i in 0..SplitDTiles::SCORE_REGISTERS {
        s.insert(
            comptime!(fragment * SplitDTiles::SCORE_REGISTERS + i),
            own.extract(i),
        );
    }
    s
}

/// O by its rows' new references, where these moved.
#[cube]
fn rescaled_output<AO: Size>(
    o: Vector<f32, AO>,
    places: &Places,
    roles: &Roles,
    #[comptime] tiles: SplitDTiles,
) -> Vector<f32, AO> {
    let mut o = o;
    let row = roles.output_row + UNIT_POS % 32u32 / 4u32;
    let count = comptime!(8 * tiles.value_steps());
    #[unroll]
    for fragment in 0..tiles.output_fragments() {
        let moved =
            load_shared(places.moved + roles.output_row / 4u32 + comptime!(4 * fragment as u32));
        if moved != 0u32 {
            let own_row = row + comptime!((fragment * FRAGMENT_ROWS) as u32);
            let factors = told_rows(places.factors, own_row);
            #[unroll]
            for i in 0..comptime!(count / 4) {
                let first = comptime!(fragment * count + 4 * i);
                o.insert(first, o.extract(first) * factors.first);
                o.insert(
                    comptime!(first + 1),
                    o.extract(comptime!(first + 1)) * factors.first,
                );
                o.insert(
                    comptime!(first + 2),
                    o.extract(comptime!(first + 2)) * factors.second,
                );
                o.insert(
                    comptime!(first + 3),
                    o.extract(comptime!(first + 3)) * factors.second,
                );
            }
        }
    }
    o
}

/// O with a chunk's values by P. Where there may be keys that nobody sees, their values are multiplied as zeros.
#[cube]
fn with_chunk<AO: Size>(
    o: Vector<f32, AO>,
    place: &Place,
    probabilities: u32,
    roles: &Roles,
    may_have_masked: bool,
    used: u32,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AO> {
    let left = left_address(probabilities, roles.output_row);
    let right = turn_address(place.slot, roles.column_group, tiles.value_keys);
    let mut o = o;
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            o = add_shared_product::<AO>(
                o,
                left,
                right,
                used,
                comptime!(value_product(tiles, chunk, true)),
            );
        } else {
            o = add_shared_product::<AO>(
                o,
                left,
                right,
                0u32,
                comptime!(value_product(tiles, chunk, false)),
            );
        }
    } else {
        o = add_shared_product::<AO>(
            o,
            left,
            right,
            0u32,
            comptime!(value_product(tiles, chunk, false)),
        );
    }
    o
}

/// The product by the `chunk`-th chunk of values.
const fn value_product(tiles: SplitDTiles, chunk: usize, masked: bool) -> SharedSums {
    let part = chunk % tiles.value_parts;
    SharedSums {
        fragments: tiles.output_fragments(),
        steps: tiles.value_steps(),
        first_step: part * tiles.part_steps(),
        added_steps: tiles.part_steps(),
        groups: tiles.column_groups(),
        first_depth: chunk / tiles.value_parts * tiles.value_keys,
        depth: tiles.value_keys,
        left_rows: tiles.rows,
        right_rows: tiles.value_keys,
        masked,
        half: tiles.half,
    }
}
