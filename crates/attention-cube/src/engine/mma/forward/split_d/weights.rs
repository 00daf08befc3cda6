//! A block's P, of which each warp makes a part, and the maxima that the warps of a row agree on.

use super::Places;
use super::roles::Roles;
use crate::engine::mma::fragments::{tell_rows, told_rows, used_by_warps};
use crate::engine::mma::plan::split_d::SplitDTiles;
use crate::fragment::softmax::{
    SoftmaxState, maxima, numerators, own_maxima, rescaled, softmax_state,
};
use crate::fragment::work_tile::TileKind;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::product::{pair_address, store_fragments};
use cube_kit::hopper::accumulator::{Pair, pair};
use cube_kit::hopper::ptx::{pack, store_shared};
use cubecl::prelude::*;

/// The registers of one of a warp's fragments.
#[cube]
pub(super) fn score_fragment<AS: Size, NS: Size>(
    s: Vector<f32, AS>,
    #[comptime] fragment: usize,
) -> Vector<f32, NS> {
    let mut own = Vector::<f32, NS>::zeroed();
    #[unroll]
    for i in 0..SplitDTiles::SCORE_REGISTERS {
        own.insert(
            i,
            s.extract(comptime!(fragment * SplitDTiles::SCORE_REGISTERS + i)),
        );
    }
    own
}

/// Tells the other warps of the rows the largest scores of a fragment, `row` the thread's first.
#[cube]
pub(super) fn tell_maxima<NS: Size>(
    s: Vector<f32, NS>,
    least: Pair,
    row: u32,
    places: &Places,
    roles: &Roles,
    #[comptime] tiles: SplitDTiles,
) {
    let own = maxima(own_maxima::<NS>(s, least, SplitDTiles::SCORE_KEYS));
    tell_rows(
        own,
        places.maxima + roles.key_group * comptime!(4 * tiles.rows as u32),
        row,
    );
}

/// The largest scores of a fragment's rows that any warp told.
#[cube]
fn told_maxima(places: &Places, row: u32, #[comptime] tiles: SplitDTiles) -> Pair {
    let own = told_rows(places.maxima, row);
    let mut first = own.first;
    let mut second = own.second;
    #[unroll]
    for group in 1..tiles.key_groups() {
        let table = places.maxima + comptime!((4 * group * tiles.rows) as u32);
        let other = told_rows(table, row);
        first = max(first, other.first);
        second = max(second, other.second);
    }
    Pair { first, second }
}

/// How far a warp's rows are with a block, and in place of its scores the pairs of P: a fragment's first registers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Weighed<AS: Size> {
    pub pairs: Vector<f32, AS>,
    pub state_0: SoftmaxState,
    pub state_1: SoftmaxState,
}

/// Makes P of a warp's scores, when all have told their maxima, and tells all warps what becomes of its rows' older outputs. `row`
/// is the thread's first.
#[cube]
pub(super) fn weigh<NS: Size, AS: Size>(
    s: Vector<f32, AS>,
    before_0: SoftmaxState,
    before_1: SoftmaxState,
    row: u32,
    places: &Places,
    roles: &Roles,
    power: f32,
    hidden: f32,
    #[comptime] tiles: SplitDTiles,
) -> Weighed<AS> {
    let mut pairs = s;
    let mut state_0 = before_0;
    let mut state_1 = before_1;
    #[unroll]
    for fragment in 0..tiles.score_fragments() {
        let before = if comptime!(fragment == 0) {
            before_0
        } else {
            before_1
        };
        let own_row = row + comptime!((fragment * FRAGMENT_ROWS) as u32);
        let made = rescaled::<NS>(
            score_fragment::<AS, NS>(s, fragment),
            told_maxima(places, own_row, tiles),
            before.row_max,
            power,
            hidden,
            true,
            SplitDTiles::SCORE_KEYS,
        );
        if roles.key_group == 0u32 {
            tell_rows(made.factor, places.factors, own_row);
            let lane = UNIT_POS % 32u32;
            if lane == 0u32 {
                let fragments = comptime!(4 * fragment as u32);
                let at = places.moved + roles.score_row / 4u32 + fragments;
                store_shared(at, u32::cast_from(made.moved));
            }
        }
        let mut sum_0 = f32::new(0.0);
        let mut sum_1 = f32::new(0.0);
        #[unroll]
        for step in 0..comptime!(SplitDTiles::SCORE_KEYS / 16) {
            let part = numerators::<NS>(made.s, made.row_max.shift, power, step, false);
            #[unroll]
            for i in 0..4usize {
                let first = part.values.extract(comptime!(2 * i));
                let second = part.values.extract(comptime!(2 * i + 1));
                pairs.insert(
                    comptime!(fragment * SplitDTiles::SCORE_REGISTERS + 4 * step + i),
                    f32::reinterpret(pack(first, second, tiles.half)),
                );
            }
            sum_0 += part.sums.first;
            sum_1 += part.sums.second;
        }
        let state = softmax_state::<NS>(made, before.sums, pair(sum_0, sum_1));
        if comptime!(fragment == 0) {
            state_0 = state;
        } else {
            state_1 = state;
        }
    }
    Weighed::<AS> {
        pairs,
        state_0,
        state_1,
    }
}

/// Where P lies of a pass of this parity.
#[cube]
pub(super) fn shared_probabilities(
    places: &Places,
    parity: u32,
    #[comptime] tiles: SplitDTiles,
) -> u32 {
    if comptime!(tiles.shares == 1) {
        places.probabilities
    } else {
        places.probabilities + parity * comptime!(tiles.probability_bytes() as u32)
    }
}

/// Where the bits of used keys lie of a pass of this parity.
#[cube]
fn shared_used(places: &Places, parity: u32, #[comptime] tiles: SplitDTiles) -> u32 {
    if comptime!(tiles.shares == 1) {
        places.used
    } else {
        places.used + parity * comptime!(SplitDTiles::USED_BYTES as u32)
    }
}

/// Tells all warps a warp's part of P.
#[cube]
pub(super) fn share<AS: Size>(
    pairs: Vector<f32, AS>,
    places: &Places,
    roles: &Roles,
    parity: u32,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) {
    store_fragments::<f32, AS>(
        pair_address(
            shared_probabilities(places, parity, tiles),
            roles.score_row,
            roles.key_group,
            tiles.rows,
        ),
        pairs,
        tiles.score_fragments(),
        SplitDTiles::SCORE_REGISTERS,
    );
    if comptime!(kind.leaves_masked()) {
        let used = used_pairs::<AS>(pairs, tiles);
        let lane = UNIT_POS % 32u32;
        if lane < 4u32 {
            store_shared(
                shared_used(places, parity, tiles) + roles.warp * 16u32 + lane * 4u32,
                used,
            );
        }
    }
}

/// The keys that some row of the warp uses, of those that this lane has: bits `4 s` to `4 s + 3` are of the `s`-th 16.
#[cube]
fn used_pairs<AS: Size>(pairs: Vector<f32, AS>, #[comptime] tiles: SplitDTiles) -> u32 {
    let mut used = 0u32;
    #[unroll]
    for tile in 0..comptime!(SplitDTiles::SCORE_KEYS / 8) {
        let mut both = 0u32;
        #[unroll]
        for fragment in 0..tiles.score_fragments() {
            let first = comptime!(fragment * SplitDTiles::SCORE_REGISTERS + 2 * tile);
            both |= u32::reinterpret(pairs.extract(first))
                | u32::reinterpret(pairs.extract(comptime!(first + 1)));
        }
        used |= select(
            both & 0xFFFFu32 != 0u32,
            comptime!(1u32 << (2 * tile)),
            0u32,
        ) | select(both >= 0x10000u32, comptime!(2u32 << (2 * tile)), 0u32);
    }
    used |= plane_shuffle_xor(used, 4u32);
    used |= plane_shuffle_xor(used, 8u32);
    used |= plane_shuffle_xor(used, 16u32);
    used
}

/// The keys of a block that some row of a warp's output uses, of those that this lane multiplies by.
#[cube]
pub(super) fn told_used(
    places: &Places,
    roles: &Roles,
    parity: u32,
    #[comptime] tiles: SplitDTiles,
) -> u32 {
    let first_warp = roles.output_row / comptime!(tiles.score_rows() as u32)
        * comptime!(tiles.key_groups() as u32);
    used_by_warps(
        shared_used(places, parity, tiles) + first_warp * 16u32,
        comptime!(tiles.output_rows().div_ceil(tiles.score_rows()) * tiles.key_groups()),
        tiles.key_groups(),
    )
}
