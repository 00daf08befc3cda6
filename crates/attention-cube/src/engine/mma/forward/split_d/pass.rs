//! A cube passes over a tile's blocks.

use super::Places;
use super::chunks::{Operands, Pass, fill, slot, slot_after};
use super::roles::Roles;
use super::weights::{score_fragment, share, tell_maxima, told_used, weigh};
use crate::engine::mma::fragments::told_rows;
use crate::engine::mma::plan::split_d::SplitDTiles;
use crate::fragment::RowPair;
use crate::fragment::bias::BiasWords;
use crate::fragment::score::score;
use crate::fragment::scoring::Scoring;
use crate::fragment::softmax::{SoftmaxState, empty_state};
use crate::fragment::view::{View, view};
use crate::fragment::visits::{next_block, tile_position};
use crate::fragment::work_tile::{AssignedTile, TileKind};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::copy::await_copies;
use cube_kit::ampere::product::{
    Scores, SharedSums, add_scores, add_shared_product, left_address, right_address, scores,
    turn_address,
};
use cube_kit::hopper::ROW_BYTES;
use cube_kit::hopper::SUBTILE;
use cube_kit::hopper::ptx::load_shared;
use cubecl::prelude::*;

/// What a warp has of a tile: its part of the output, and how far the rows of its scores are.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Attended<AO: Size> {
    pub o: Vector<f32, AO>,
    pub state_0: SoftmaxState,
    pub state_1: SoftmaxState,
}

/// Visits a tile's blocks. The copies of the queries have been started, and are of the first group that ends here.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn attend<F: Float, NB: Size, NS: Size, AS: Size, AO: Size>(
    assigned: &AssignedTile,
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
    let mut first_slot = 0u32;
    if keys < end {
        let pass = Pass {
            values,
            keys,
            after: end,
            first_slot,
        };
        #[unroll]
        for chunk in 0..comptime!(tiles.slots - 1) {
            fill(operands, &pass, chunk, tiles);
        }
    }
    while keys < end || values < end {
        let pass = Pass {
            values,
            keys,
            after: next_block(tile, keys + 1i32, masking, kind),
            first_slot,
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
            turn(operands, &pass, chunk, tiles);
            if comptime!(chunk == 0) {
                if has_values {
                    o = rescaled_output::<AO>(o, places, roles, tiles);
                }
            }
            if has_keys {
                s = scores_of_chunk::<AS>(s, operands, &pass, places, roles, chunk, tiles);
            }
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
        }
        let mut used = 0u32;
        #[unroll]
        for chunk in 0..tiles.value_chunks() {
            turn(
                operands,
                &pass,
                comptime!(tiles.key_chunks() + chunk),
                tiles,
            );
            if comptime!(chunk == 0) {
                if comptime!(kind.leaves_masked()) {
                    if has_values {
                        used = told_used(places, roles, tiles);
                    }
                }
                if has_keys && weighs_first {
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
                    operands,
                    &pass,
                    places,
                    roles,
                    may_have_masked,
                    used,
                    chunk,
                    tiles,
                    kind,
                );
            }
            if comptime!(chunk == 0) {
                if has_keys && !weighs_first {
                    let weighed = weigh::<NS, AS>(
                        s, state_0, state_1, row, places, roles, power, hidden, tiles,
                    );
                    s = weighed.pairs;
                    state_0 = weighed.state_0;
                    state_1 = weighed.state_1;
                }
            }
        }
        // All have multiplied by the last P.
        sync_cube();
        if has_keys {
            share::<AS>(s, places, roles, tiles, kind);
        }
        may_have_masked = seen_0.may_have_masked;
        values = keys;
        keys = pass.after;
        first_slot = slot_after(first_slot, comptime!(tiles.chunks() % tiles.slots), tiles);
    }
    Attended::<AO> {
        o,
        state_0,
        state_1,
    }
}

/// Waits for a chunk, and for all to be done with the one before it, into whose slot the next copies go.
#[cube]
fn turn(
    operands: &Operands,
    pass: &Pass,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
) {
    await_copies(comptime!(tiles.slots - 2));
    sync_cube();
    fill(operands, pass, comptime!(chunk + tiles.slots - 1), tiles);
}

/// The dots of a warp's rows and keys with those of a chunk's columns.
#[cube]
fn scores_of_chunk<AS: Size>(
    s: Vector<f32, AS>,
    operands: &Operands,
    pass: &Pass,
    places: &Places,
    roles: &Roles,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
) -> Vector<f32, AS> {
    let subtiles = comptime!(chunk * tiles.key_columns / SUBTILE);
    let left = left_address(places.queries, roles.score_row)
        + comptime!((subtiles * tiles.rows * ROW_BYTES) as u32);
    let right = right_address(
        slot(operands, pass, chunk, tiles)
            + roles.key_group * comptime!((SplitDTiles::SCORE_KEYS * ROW_BYTES) as u32),
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
    operands: &Operands,
    pass: &Pass,
    places: &Places,
    roles: &Roles,
    may_have_masked: bool,
    used: u32,
    #[comptime] chunk: usize,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AO> {
    let left = left_address(places.probabilities, roles.output_row);
    let right = turn_address(
        slot(operands, pass, comptime!(tiles.key_chunks() + chunk), tiles),
        roles.column_group,
        tiles.value_keys,
    );
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
