//! The heads of a projection: `norm`, its weight, the rotation of the row's position, and the place where attention reads
//! them — the queries' tensor or a slot of the cache.
//!
//! Budget: a float a part of the cube in shared memory, a pair of channels in registers. Bound by latency: one cube a head,
//! which it reads twice, the second time from the cache.

use crate::op::sums::{Team, cube_sum};
use cubecl::prelude::*;

/// The strides of `[sequences, heads, slots, columns]`, whose columns lie together.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(super) struct HeadStrides {
    pub row: u32,
    pub head: u32,
    pub slot: u32,
}

/// Which columns of the target a head's channels go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Columns {
    /// Their own.
    Channels,
    /// Those of values in slots that keys share: first the rotated channels.
    CompactValues,
    /// Those of keys there: behind the values the rotated channels, and no others.
    CompactKeys,
    /// Those of queries that read there: the rotated channels last.
    CompactQueries,
}

/// The column of a pair's first or second channel. The first `rotated` pairs are rotated.
#[cube]
fn column(
    pair: u32,
    pairs: u32,
    rotated: u32,
    #[comptime] second: bool,
    #[comptime] columns: Columns,
) -> u32 {
    let behind = if comptime!(second) {
        select(pair < rotated, rotated, pairs)
    } else {
        select(pair < rotated, 0u32, rotated)
    };
    let of_values = pair + behind;
    if comptime!(columns == Columns::Channels && second) {
        pair + pairs
    } else if comptime!(columns == Columns::Channels) {
        pair
    } else if comptime!(columns == Columns::CompactValues) {
        of_values
    } else if comptime!(columns == Columns::CompactKeys) {
        of_values + 2u32 * pairs
    } else {
        (of_values + 2u32 * (pairs - rotated)) % (2u32 * pairs)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn place_heads<E: Float, I: Int>(
    projected: &Tensor<E>,
    weight: ComptimeOption<&Tensor<E>>,
    cos: ComptimeOption<&Tensor<E>>,
    sin: ComptimeOption<&Tensor<E>>,
    positions: ComptimeOption<&Tensor<I>>,
    target: &mut Tensor<E>,
    strides: HeadStrides,
    rows: u32,
    rows_each: u32,
    positions_in_order: u32,
    heads: u32,
    pairs: u32,
    rotated: u32,
    slots: u32,
    epsilon: f32,
    #[comptime] columns: Columns,
    #[comptime] team: Team,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    let head = CUBE_POS as u32 % heads;
    let row = CUBE_POS as u32 / heads;
    if row >= rows {
        terminate!();
    }
    let from = CUBE_POS * 2 * pairs as usize;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));

    let mut squares = 0.0f32;
    let mut pair = UNIT_POS;
    while pair < pairs {
        let first = f32::cast_from(projected[from + pair as usize]);
        let second = f32::cast_from(projected[from + (pair + pairs) as usize]);
        squares += first * first + second * second;
        pair += comptime!(team.units as u32);
    }
    let mean = cube_sum(squares, &mut partial, team) / (2u32 * pairs) as f32;
    let factor = 1.0f32 / (mean + epsilon).sqrt();

    let mut position = row % positions_in_order;
    #[comptime]
    match &positions {
        ComptimeOption::Some(positions) => {
            position = u32::cast_from(positions[row as usize]);
        }
        ComptimeOption::None => {}
    }
    let to = (row / rows_each) as usize * strides.row as usize
        + head as usize * strides.head as usize
        + (position % slots) as usize * strides.slot as usize;
    let placed = if comptime!(columns == Columns::CompactKeys) {
        rotated
    } else {
        pairs
    };
    let mut pair = UNIT_POS;
    while pair < placed {
        let (low, high) = (pair as usize, (pair + pairs) as usize);
        let mut first = f32::cast_from(projected[from + low]) * factor;
        let mut second = f32::cast_from(projected[from + high]) * factor;
        #[comptime]
        match &weight {
            ComptimeOption::Some(weight) => {
                first *= f32::cast_from(weight[low]);
                second *= f32::cast_from(weight[high]);
            }
            ComptimeOption::None => {}
        }
        // As the norm leaves them.
        first = f32::cast_from(E::cast_from(first));
        second = f32::cast_from(E::cast_from(second));
        #[comptime]
        match &cos {
            ComptimeOption::Some(cos) => {
                let at = position as usize * pairs as usize + low;
                let c = f32::cast_from(cos[at]);
                #[comptime]
                match &sin {
                    ComptimeOption::Some(sin) => {
                        let s = f32::cast_from(sin[at]);
                        let rotated = first * c - second * s;
                        second = second * c + first * s;
                        first = rotated;
                    }
                    ComptimeOption::None => {}
                }
            }
            ComptimeOption::None => {}
        }
        let low = column(pair, pairs, rotated, false, columns);
        let high = column(pair, pairs, rotated, true, columns);
        target[to + low as usize] = E::cast_from(first);
        target[to + high as usize] = E::cast_from(second);
        pair += comptime!(team.units as u32);
    }
}
