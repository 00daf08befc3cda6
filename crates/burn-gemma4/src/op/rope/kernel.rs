//! The heads of a projection: `norm`, its weight, the rotation of the row's position, and the place where attention reads
//! them — the queries' tensor or a slot of the cache.
//!
//! Budget: a float a part of the cube in shared memory, in registers a unit's pairs of channels, of which a team has one, and up
//! to four without plane operations. Bound by latency: one cube a head, which it reads once.

use crate::op::sums::{Team, cube_sum};
use cube_kit::overlap::{take_turn, was_written, was_written_if_there};
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
pub(super) fn place_heads_overlapped<E: Float, I: Int>(
    projected: &Tensor<E>,
    weight: ComptimeOption<&Tensor<E>>,
    cos: ComptimeOption<&Tensor<E>>,
    sin: ComptimeOption<&Tensor<E>>,
    positions: ComptimeOption<&Tensor<I>>,
    target: &mut Tensor<E>,
    strides: HeadStrides,
    projected_stride: u32,
    start: u32,
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
    #[comptime] held: usize,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    take_turn(overlaps);
    was_written(projected, overlaps);
    was_written_if_there(weight, overlaps);
    was_written_if_there(cos, overlaps);
    was_written_if_there(sin, overlaps);
    was_written_if_there(positions, overlaps);
    let head = CUBE_POS as u32 % heads;
    let row = CUBE_POS as u32 / heads;
    if row >= rows {
        terminate!();
    }
    let from = row as usize * projected_stride as usize
        + start as usize
        + head as usize * 2 * pairs as usize;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));
    let mut position = row % positions_in_order;
    #[comptime]
    match &positions {
        ComptimeOption::Some(positions) => {
            position = u32::cast_from(positions[row as usize]);
        }
        ComptimeOption::None => {}
    }

    // All that a unit needs is on its way at once.
    let mut firsts = Array::<f32>::new(held);
    let mut seconds = Array::<f32>::new(held);
    let mut first_weights = Array::<f32>::new(held);
    let mut second_weights = Array::<f32>::new(held);
    let mut cosines = Array::<f32>::new(held);
    let mut sines = Array::<f32>::new(held);
    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        let pair = UNIT_POS + comptime!((index * team.units) as u32);
        if pair < pairs {
            let (low, high) = (pair as usize, (pair + pairs) as usize);
            firsts[index] = f32::cast_from(projected[from + low]);
            seconds[index] = f32::cast_from(projected[from + high]);
            #[comptime]
            match &weight {
                ComptimeOption::Some(weight) => {
                    first_weights[index] = f32::cast_from(weight[low]);
                    second_weights[index] = f32::cast_from(weight[high]);
                }
                ComptimeOption::None => {}
            }
            let at = position as usize * pairs as usize + low;
            #[comptime]
            match &cos {
                ComptimeOption::Some(cos) => {
                    cosines[index] = f32::cast_from(cos[at]);
                }
                ComptimeOption::None => {}
            }
            #[comptime]
            match &sin {
                ComptimeOption::Some(sin) => {
                    sines[index] = f32::cast_from(sin[at]);
                }
                ComptimeOption::None => {}
            }
            squares += firsts[index] * firsts[index] + seconds[index] * seconds[index];
        }
    }
    let mean = cube_sum(squares, &mut partial, team) / (2u32 * pairs) as f32;
    let factor = 1.0f32 / (mean + epsilon).sqrt();

    let to = (row / rows_each) as usize * strides.row as usize
        + head as usize * strides.head as usize
        + (position % slots) as usize * strides.slot as usize;
    let placed = if comptime!(columns == Columns::CompactKeys) {
        rotated
    } else {
        pairs
    };
    #[unroll]
    for index in 0..held {
        let pair = UNIT_POS + comptime!((index * team.units) as u32);
        if pair < placed {
            let mut first = firsts[index] * factor;
            let mut second = seconds[index] * factor;
            #[comptime]
            match &weight {
                ComptimeOption::Some(_) => {
                    first *= first_weights[index];
                    second *= second_weights[index];
                }
                ComptimeOption::None => {}
            }
            // As the norm leaves them.
            first = f32::cast_from(E::cast_from(first));
            second = f32::cast_from(E::cast_from(second));
            #[comptime]
            match &cos {
                ComptimeOption::Some(_) => {
                    let (c, s) = (cosines[index], sines[index]);
                    let rotated = first * c - second * s;
                    second = second * c + first * s;
                    first = rotated;
                }
                ComptimeOption::None => {}
            }
            let low = column(pair, pairs, rotated, false, columns);
            let high = column(pair, pairs, rotated, true, columns);
            target[to + low as usize] = E::cast_from(first);
            target[to + high as usize] = E::cast_from(second);
        }
    }
}
