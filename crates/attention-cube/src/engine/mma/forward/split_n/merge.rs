//! How the outputs of the groups of keys become one.
//!
//! Each group has the rows' outputs and sums by references of its own. They are brought to the largest reference, like the parts of an
//! output whose keys were split over cubes, and each warp adds up some columns of all groups', in their order: equal bits every time.

use super::stages::Roles;
use crate::engine::mma::forward::warp::{Attended, WarpStates};
use crate::engine::mma::fragments::{tell_rows, told_rows};
use crate::engine::mma::plan::split_n::SplitNTiles;
use crate::fragment::output::{Finished, STEP_REGISTERS};
use crate::fragment::softmax::{SoftmaxState, finite, totals};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::exchange::{FOURS_BYTES, exchange_address, load_registers, store_registers};
use cube_kit::hopper::accumulator::{Pair, is_second};
use cube_kit::hopper::ptx::exp2;
use cubecl::prelude::*;

/// Bytes of 16 columns of a fragment.
const STEP_BYTES: usize = STEP_REGISTERS / 4 * FOURS_BYTES;

/// The tables of the groups' references and sums, a word a row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Tables {
    pub references: u32,
    pub sums: u32,
}

/// What a row's largest reference and its sum by that are, of both of the thread's rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Together {
    reference: Pair,
    sums: Pair,
}

/// What brings a group's results to the reference of all.
#[cube]
fn factors(own: Pair, all: Pair, power: f32, hidden: f32) -> Pair {
    Pair {
        first: exp2((own.first - finite(all.first, hidden)) * power),
        second: exp2((own.second - finite(all.second, hidden)) * power),
    }
}

/// Where a group's words start in a table, of the fragment's rows.
#[cube]
fn words(
    table: u32,
    #[comptime] group: usize,
    #[comptime] fragment: usize,
    #[comptime] tiles: SplitNTiles,
) -> u32 {
    table + comptime!((4 * (group * tiles.rows() + fragment * FRAGMENT_ROWS)) as u32)
}

/// Of a fragment's rows, when all groups have told what they have.
#[cube]
fn together(
    tables: &Tables,
    row: u32,
    power: f32,
    hidden: f32,
    #[comptime] fragment: usize,
    #[comptime] tiles: SplitNTiles,
) -> Together {
    let mut largest_0 = hidden;
    let mut largest_1 = hidden;
    #[unroll]
    for group in 0..tiles.key_groups {
        let own = told_rows(words(tables.references, group, fragment, tiles), row);
        largest_0 = max(largest_0, own.first);
        largest_1 = max(largest_1, own.second);
    }
    let reference = Pair {
        first: largest_0,
        second: largest_1,
    };
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    #[unroll]
    for group in 0..tiles.key_groups {
        let own = told_rows(words(tables.references, group, fragment, tiles), row);
        let sums = told_rows(words(tables.sums, group, fragment, tiles), row);
        let factor = factors(own, reference, power, hidden);
        sum_0 += sums.first * factor.first;
        sum_1 += sums.second * factor.second;
    }
    Together {
        reference,
        sums: Pair {
            first: sum_0,
            second: sum_1,
        },
    }
}

/// Tells all warps what this one has of its rows, in the place of its stages, and the group's references and sums.
#[cube]
pub(super) fn tell_results<AO: Size>(
    attended: &Attended<AO>,
    tables: &Tables,
    roles: &Roles,
    power: f32,
    hidden: f32,
    #[comptime] tiles: SplitNTiles,
) {
    let row = UNIT_POS % 32u32 / 4u32;
    let group_words = roles.key_group * comptime!(4 * tiles.rows() as u32);
    #[unroll]
    for fragment in 0..tiles.fragments {
        let state = state_of(&attended.states, fragment);
        let first = words(group_words, 0usize, fragment, tiles);
        let sums = totals(state.sums);
        if roles.column_group == 0u32 {
            tell_rows(state.row_max.reference, tables.references + first, row);
            tell_rows(sums, tables.sums + first, row);
        }
    }
    sync_cube();
    let count = comptime!(tiles.vectors()[5] / tiles.fragments);
    let used = comptime!(STEP_REGISTERS * tiles.warp().steps());
    let mut o = attended.o;
    #[unroll]
    for fragment in 0..tiles.fragments {
        let state = state_of(&attended.states, fragment);
        let all = together(tables, row, power, hidden, fragment, tiles);
        let factor = factors(state.row_max.reference, all.reference, power, hidden);
        let sums = totals(state.sums);
        #[unroll]
        for i in 0..used {
            let register = comptime!(fragment * count + i);
            let (own, sum) = if comptime!(is_second(i)) {
                (factor.second, sums.second)
            } else {
                (factor.first, sums.first)
            };
            // Of a row that has seen nothing the output may be anything: others of the tile may have seen NaN.
            let scaled = o.extract(register) * own;
            o.insert(register, select(sum == 0.0f32, 0.0f32, scaled));
        }
        store_registers::<AO>(
            exchange_address(roles.stages)
                + comptime!((fragment * tiles.warp().steps() * STEP_BYTES) as u32),
            o,
            comptime!(fragment * count),
            used,
        );
    }
    sync_cube();
}

#[cube]
fn state_of(states: &WarpStates, #[comptime] fragment: usize) -> SoftmaxState {
    if comptime!(fragment == 0) {
        states.first
    } else {
        states.second
    }
}

/// The columns of a fragment that this warp puts together, of those that its group's warps have in common.
#[cube]
pub(super) fn put_together<NO: Size>(
    tables: &Tables,
    roles: &Roles,
    power: f32,
    hidden: f32,
    #[comptime] fragment: usize,
    #[comptime] tiles: SplitNTiles,
) -> Finished<NO> {
    let row = UNIT_POS % 32u32 / 4u32;
    let all = together(tables, row, power, hidden, fragment, tiles);
    let group_bytes = comptime!((tiles.column_groups * tiles.warp_bytes()) as u32);
    // Of the first group's warp that has these columns.
    let first = exchange_address(roles.stages) - roles.key_group * group_bytes;
    let mut o = Vector::<f32, NO>::zeroed();
    #[unroll]
    for own in 0..tiles.part_steps() {
        let step = roles.first_step + comptime!(own as u32);
        if step < comptime!(tiles.warp().steps() as u32) {
            let at = first
                + comptime!((fragment * tiles.warp().steps() * STEP_BYTES) as u32)
                + step * comptime!(STEP_BYTES as u32);
            let mut sum = Vector::<f32, Const<STEP_REGISTERS>>::zeroed();
            #[unroll]
            for group in 0..tiles.key_groups {
                let offset = comptime!(group as u32) * group_bytes;
                sum += load_registers::<Const<STEP_REGISTERS>>(at + offset, STEP_REGISTERS);
            }
            #[unroll]
            for i in 0..STEP_REGISTERS {
                o.insert(comptime!(own * STEP_REGISTERS + i), sum.extract(i));
            }
        }
    }
    Finished::<NO> {
        o,
        reference: all.reference,
        sums: all.sums,
    }
}
