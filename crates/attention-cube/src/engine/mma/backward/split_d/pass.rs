//! A cube passes over the blocks that its tile sees.

use super::ring::{Operands, Pass, fill, terms_place};
use super::roles::Roles;
use super::weights::{score_gradients, share, told_used, weigh};
use crate::engine::mma::backward::part::{Part, seen_by_warp, terms_of_warp, warp_has_far};
use crate::engine::mma::plan::GradientSplitDTiles;
use crate::engine::mma::ring::{Place, Turn, await_full, place_of, tell_empty, turn_after};
use crate::fragment::scoring::Scoring;
use crate::fragment::stationary::{Stationary, Visit, visit_from};
use crate::fragment::work_tile::TileKind;
use cube_kit::ampere::product::{
    Scores, SharedSums, add_scores, add_shared_product, left_address, right_address, scores,
    turn_address,
};
use cube_kit::hopper::{ROW_BYTES, SUBTILE};
use cubecl::prelude::*;

/// Columns of a warp's part.
const PART: usize = GradientSplitDTiles::PART;

/// A warp's gradient, when the tile has passed over all that it sees, from the `first` visit on. The copies of what stays of it have
/// been started.
#[cube]
pub(super) fn sum<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size, AG: Size>(
    operands: &Operands,
    terms: &Tensor<f32>,
    tile: &Stationary,
    first: Visit,
    roles: &Roles,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AG> {
    let masking = &scoring.masking;
    let start = operands.start;
    let row = (roles.score_row + UNIT_POS % 32u32 / 4u32) as i32;
    let first_word = roles.part_group * comptime!((PART / 32) as u32);
    let part = comptime!(Part {
        fragments: tiles.score_fragments(),
        columns: PART,
        block: tiles.columns,
    });
    let row_terms = terms_of_warp(terms, tile, row, &masking.extent, part, kind.fragment);
    let lanes = lanes(roles, start, tiles);
    let mut sums = Vector::<f32, AG>::zeroed();
    let mut head = first.head;
    let mut block = first.block;
    let mut slot = 0u32;
    let mut parity = 0u32;
    let mut stage = 0u32;
    if head < tile.heads {
        let pass = Pass {
            visit: first,
            next: first,
            first: Turn { slot, parity },
            stage,
        };
        #[unroll]
        for chunk in 0..comptime!(tiles.slots - 1) {
            fill(operands, terms, tile, &pass, chunk, tiles);
        }
    }
    while head < tile.heads {
        let pass = Pass {
            visit: Visit { head, block },
            next: visit_from(tile, head, block + 1i32, masking, kind),
            first: Turn { slot, parity },
            stage,
        };
        let seen = seen_by_warp::<F, NB>(tile, row, head, block, first_word, scoring, part, kind);
        let terms_at =
            terms_place(operands, stage, tiles) + roles.part_group * comptime!(4 * PART as u32);
        let mut s = Vector::<f32, AS>::zeroed();
        #[unroll]
        for chunk in 0..tiles.dot_chunks() {
            let place = await_chunk(operands, &pass, chunk, tiles);
            s = scores_of_chunk::<AS>(s, &place, &lanes, false, chunk, tiles);
            leave_chunk(operands, terms, tile, &pass, &place, chunk, tiles);
        }
        let has_far = warp_has_far(&row_terms, terms_at, tiles.columns, PART, kind.fragment);
        let weighed = weigh::<F, NB, NS, NP, AS, AP>(
            s,
            &seen,
            &row_terms,
            terms_at,
            block * comptime!(tiles.columns as i32)
                + (roles.part_group * comptime!(PART as u32)) as i32,
            scoring,
            has_far,
            tiles,
            kind.fragment,
        );
        // By the first chunk's turn all were done with what was shared of the last block: its last chunk's slot has been filled.
        if comptime!(tiles.sums.has_values()) {
            share::<AP>(
                weighed.p,
                start,
                roles,
                comptime!(tiles.gradients() - 1),
                tiles,
                kind,
            );
        }
        if comptime!(tiles.sums.has_dots()) {
            let mut dp = Vector::<f32, AS>::zeroed();
            #[unroll]
            for chunk in 0..tiles.value_chunks() {
                let index = comptime!(tiles.dot_chunks() + chunk);
                let place = await_chunk(operands, &pass, index, tiles);
                dp = scores_of_chunk::<AS>(dp, &place, &lanes, true, chunk, tiles);
                leave_chunk(operands, terms, tile, &pass, &place, index, tiles);
            }
            let ds = score_gradients::<NS, NP, AS, AP>(
                weighed.w,
                dp,
                &seen,
                &row_terms,
                terms_at,
                tiles,
                kind.fragment,
            );
            share::<AP>(ds, start, roles, 0usize, tiles, kind);
        }
        sync_cube();
        let may_have_masked = seen.first.view.may_have_masked;
        let used = if comptime!(kind.leaves_masked()) {
            told_used(start, roles, tiles)
        } else {
            0u32.runtime()
        };
        #[unroll]
        for chunk in 0..tiles.sum_chunks() {
            let index = comptime!(tiles.dot_chunks() + tiles.value_chunks() + chunk);
            let place = await_chunk(operands, &pass, index, tiles);
            sums = with_chunk::<AG>(
                sums,
                &place,
                &lanes,
                may_have_masked,
                used,
                chunk,
                tiles,
                kind,
            );
            leave_chunk(operands, terms, tile, &pass, &place, index, tiles);
        }
        let turn = turn_after(
            &pass.first,
            comptime!(tiles.chunks()),
            comptime!(tiles.ring()),
        );
        head = pass.next.head;
        block = pass.next.block;
        slot = turn.slot;
        parity = turn.parity;
        stage ^= 1u32;
    }
    sums
}

/// Where a lane reads: from shared memory's start on what stays and what is shared, from a slot's on what comes through the ring.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Lanes {
    start: u32,
    /// The tile's rows of the warp's scores.
    score_left: u32,
    /// The block's.
    score_right: u32,
    /// P or dS, from shared memory's start on.
    sum_left: u32,
    sum_right: u32,
}

#[cube]
fn lanes(roles: &Roles, start: u32, #[comptime] tiles: GradientSplitDTiles) -> Lanes {
    let factors = start
        + comptime!(tiles.factors_at() as u32)
        + roles.gradient * comptime!(tiles.factor_bytes() as u32);
    Lanes {
        start,
        score_left: left_address(0u32, roles.score_row),
        score_right: right_address(roles.part_group * comptime!((PART * ROW_BYTES) as u32)),
        sum_left: left_address(factors, roles.sum_row),
        sum_right: turn_address(
            roles.gradient * comptime!(tiles.sum_bytes() as u32),
            roles.column_group,
            tiles.sum_rows,
        ),
    }
}

/// Waits until a chunk is there.
#[cube]
fn await_chunk(
    operands: &Operands,
    pass: &Pass,
    #[comptime] chunk: usize,
    #[comptime] tiles: GradientSplitDTiles,
) -> Place {
    let place = place_of(operands.start, &pass.first, chunk, comptime!(tiles.ring()));
    await_full(&place);
    place
}

/// Gives a chunk back that has been read, and fills the slot of the one before it, which the others are likely to be done with.
#[cube]
fn leave_chunk(
    operands: &Operands,
    terms: &Tensor<f32>,
    tile: &Stationary,
    pass: &Pass,
    place: &Place,
    #[comptime] chunk: usize,
    #[comptime] tiles: GradientSplitDTiles,
) {
    tell_empty(place);
    fill(
        operands,
        terms,
        tile,
        pass,
        comptime!(chunk + tiles.slots - 1),
        tiles,
    );
}

/// The products of a warp's rows and columns with those of a chunk's columns, of dots or, where these are `values`, of values.
#[cube]
fn scores_of_chunk<AS: Size>(
    s: Vector<f32, AS>,
    place: &Place,
    lanes: &Lanes,
    #[comptime] values: bool,
    #[comptime] chunk: usize,
    #[comptime] tiles: GradientSplitDTiles,
) -> Vector<f32, AS> {
    let left = if comptime!(tiles.holds(values)) {
        lanes.start + comptime!(held_at(tiles, values, chunk) as u32)
    } else {
        place.slot + comptime!(tiles.tile_rows_at() as u32)
    };
    let left = left + lanes.score_left;
    let right = place.slot + lanes.score_right;
    let product = comptime!(Scores {
        fragments: tiles.score_fragments(),
        columns: PART,
        depth: tiles.chunk_columns(
            match values {
                true => tiles.value_dim,
                false => tiles.head_dim,
            },
            chunk
        ),
        left_rows: tiles.rows,
        right_rows: tiles.columns,
        half: tiles.half,
    });
    if comptime!(chunk == 0) {
        scores::<AS>(left, right, product)
    } else {
        add_scores::<AS>(s, left, right, product)
    }
}

/// Where the tile's columns of a chunk are, of those that stay.
const fn held_at(tiles: GradientSplitDTiles, values: bool, chunk: usize) -> usize {
    let first = match values {
        true => tiles.stationary_values_at(),
        false => 0,
    };
    first + chunk * tiles.score_columns / SUBTILE * tiles.rows * ROW_BYTES
}

/// The sums with a chunk of a block. Where there may be rows that the tile does not use, they are multiplied as zeros.
#[cube]
fn with_chunk<AG: Size>(
    sums: Vector<f32, AG>,
    place: &Place,
    lanes: &Lanes,
    may_have_masked: bool,
    used: u32,
    #[comptime] chunk: usize,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AG> {
    let left = lanes.sum_left;
    let right = place.slot + lanes.sum_right;
    let plain = comptime!(sum_product(tiles, chunk, false));
    let mut sums = sums;
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            let masked = comptime!(sum_product(tiles, chunk, true));
            sums = add_shared_product::<AG>(sums, left, right, used, masked);
        } else {
            sums = add_shared_product::<AG>(sums, left, right, 0u32, plain);
        }
    } else {
        sums = add_shared_product::<AG>(sums, left, right, 0u32, plain);
    }
    sums
}

/// The product by a chunk's rows.
const fn sum_product(tiles: GradientSplitDTiles, chunk: usize, masked: bool) -> SharedSums {
    SharedSums {
        fragments: GradientSplitDTiles::SUM_FRAGMENTS,
        steps: tiles.steps(),
        first_step: 0,
        added_steps: tiles.steps(),
        groups: tiles.column_groups(),
        first_depth: chunk * tiles.sum_rows,
        depth: tiles.sum_rows,
        left_rows: tiles.rows,
        right_rows: tiles.sum_rows,
        masked,
        half: tiles.half,
    }
}
