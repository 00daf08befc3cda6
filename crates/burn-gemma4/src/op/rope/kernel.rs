//! The heads of a projection: `norm`, its weight, the rotation of the row's position, and the place where attention reads
//! them — the queries' tensor or a slot of the cache. Of a layer with keys and values of its own, the heads of all three in one launch.
//!
//! Budget: a float a part of the cube in shared memory, in registers a unit's pairs of channels, of which a team has one, and up
//! to four without plane operations. Bound by latency: one cube a head, which it reads once. Reads that wait for each other: one behind
//! the launch before, the projection's; where weights or positions are computed, the positions and by them the tables, beside it.

use super::sides::{KEYS, Place, Side, VALUES, all_heads, place_of_head};
use crate::op::sums::{Team, first_cube_sum};
use cube_kit::overlap::{
    await_previous, let_next_begin, load_element_now, was_written, was_written_if_there,
};
use cubecl::prelude::*;

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

/// How a launch is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct HeadsPlan {
    pub columns: Columns,
    pub team: Team,
    /// Pairs of channels of a unit.
    pub held: usize,
    /// Whether keys and values of a layer are beside its queries.
    pub of_layer: bool,
    pub overlaps: bool,
    /// Whether no launch writes weights, tables and positions, so that they are read before the launch before has ended.
    pub reads_ahead: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn place_heads_overlapped<E: Float, I: Int>(
    projected: &Tensor<E>,
    weight: ComptimeOption<&Tensor<E>>,
    key_weight: ComptimeOption<&Tensor<E>>,
    cos: ComptimeOption<&Tensor<E>>,
    sin: ComptimeOption<&Tensor<E>>,
    positions: ComptimeOption<&Tensor<I>>,
    target: &mut Tensor<E>,
    keys: &mut ComptimeOption<OwnedTensor<E>>,
    values: &mut ComptimeOption<OwnedTensor<E>>,
    first_side: Side,
    keys_side: Side,
    values_side: Side,
    projected_stride: u32,
    rows: u32,
    positions_in_order: u32,
    pairs: u32,
    rotated: u32,
    epsilon: f32,
    #[comptime] plan: HeadsPlan,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    let_next_begin(plan.overlaps);
    let computed = comptime!(plan.overlaps && !plan.reads_ahead);
    await_previous(computed);
    was_written_if_there(weight, computed);
    was_written_if_there(key_weight, computed);
    was_written_if_there(cos, computed);
    was_written_if_there(sin, computed);
    was_written_if_there(positions, computed);
    let team = comptime!(plan.team);
    let held = comptime!(plan.held);
    let heads = all_heads(first_side, keys_side, values_side, plan.of_layer);
    let place = place_of_head(
        CUBE_POS as u32 % heads,
        first_side,
        keys_side,
        values_side,
        plan.of_layer,
    );
    let row = CUBE_POS as u32 / heads;
    // The others of the grid wait for the launch before.
    if row >= rows {
        terminate!();
    }
    let from = row as usize * projected_stride as usize
        + place.start as usize
        + place.head as usize * 2 * pairs as usize;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));
    let mut position = row % positions_in_order;
    let mut slot = row % place.rows_each;
    #[comptime]
    match positions {
        ComptimeOption::Some(positions) => {
            let at = load_element_now(positions.as_slice(), row as usize, plan.reads_ahead);
            position = u32::cast_from(at);
            slot = position % place.slots;
        }
        ComptimeOption::None => {}
    }

    // All that a unit needs is on its way at once, but for what it waits for.
    let mut firsts = Array::<E>::new(held);
    let mut seconds = Array::<E>::new(held);
    let mut first_weights = Array::<E>::new(held);
    let mut second_weights = Array::<E>::new(held);
    let mut cosines = Array::<E>::new(held);
    let mut sines = Array::<E>::new(held);
    #[unroll]
    for index in 0..held {
        let pair = UNIT_POS + comptime!((index * team.units) as u32);
        if pair < pairs {
            let (low, high) = (pair as usize, (pair + pairs) as usize);
            #[comptime]
            match weight {
                ComptimeOption::Some(weight) => {
                    first_weights[index] = weight_of_side(weight, key_weight, place, low, plan);
                    second_weights[index] = weight_of_side(weight, key_weight, place, high, plan);
                }
                ComptimeOption::None => {}
            }
        }
    }
    if comptime!(plan.reads_ahead) {
        read_tables(cos, sin, position, pairs, &mut cosines, &mut sines, plan);
    }
    await_previous(comptime!(plan.overlaps && plan.reads_ahead));
    was_written(projected, plan.overlaps);
    #[unroll]
    for index in 0..held {
        let pair = UNIT_POS + comptime!((index * team.units) as u32);
        if pair < pairs {
            firsts[index] = projected[from + pair as usize];
            seconds[index] = projected[from + (pair + pairs) as usize];
        }
    }
    if comptime!(!plan.reads_ahead) {
        read_tables(cos, sin, position, pairs, &mut cosines, &mut sines, plan);
    }

    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        if UNIT_POS + comptime!((index * team.units) as u32) < pairs {
            let (first, second) = (
                f32::cast_from(firsts[index]),
                f32::cast_from(seconds[index]),
            );
            squares += first * first + second * second;
        }
    }
    let mean = first_cube_sum(squares, &mut partial, team) / (2u32 * pairs) as f32;
    let factor = 1.0f32 / (mean + epsilon).sqrt();

    let to = (row / place.rows_each) as usize * place.to_sequence as usize
        + place.head as usize * place.to_head as usize
        + slot as usize * place.to_slot as usize;
    let placed = if comptime!(plan.columns == Columns::CompactKeys) {
        rotated
    } else {
        pairs
    };
    #[unroll]
    for index in 0..held {
        let pair = UNIT_POS + comptime!((index * team.units) as u32);
        if pair < placed {
            let mut first = f32::cast_from(firsts[index]) * factor;
            let mut second = f32::cast_from(seconds[index]) * factor;
            #[comptime]
            match &weight {
                ComptimeOption::Some(_) => {
                    first *= f32::cast_from(first_weights[index]);
                    second *= f32::cast_from(second_weights[index]);
                }
                ComptimeOption::None => {}
            }
            // As the norm leaves them.
            first = f32::cast_from(E::cast_from(first));
            second = f32::cast_from(E::cast_from(second));
            #[comptime]
            match &cos {
                ComptimeOption::Some(_) => {
                    let c = f32::cast_from(cosines[index]);
                    let s = f32::cast_from(sines[index]);
                    let turns = place.number != VALUES;
                    let turned = first * c - second * s;
                    second = select(turns, second * c + first * s, second);
                    first = select(turns, turned, first);
                }
                ComptimeOption::None => {}
            }
            let low = to + column(pair, pairs, rotated, false, plan.columns) as usize;
            let high = to + column(pair, pairs, rotated, true, plan.columns) as usize;
            let (first, second) = (E::cast_from(first), E::cast_from(second));
            if place.number == KEYS {
                write(keys, low, first);
                write(keys, high, second);
            } else if place.number == VALUES {
                write(values, low, first);
                write(values, high, second);
            } else {
                target[low] = first;
                target[high] = second;
            }
        }
    }
}

/// The weight of a channel: 1 for a layer's values, whose norm has none.
#[cube]
fn weight_of_side<E: Float>(
    weight: &Tensor<E>,
    key_weight: ComptimeOption<&Tensor<E>>,
    place: Place,
    channel: usize,
    #[comptime] plan: HeadsPlan,
) -> E {
    #[comptime]
    match key_weight {
        ComptimeOption::Some(key_weight) => {
            let mut of_side = E::new(1.0);
            if place.number == KEYS {
                of_side = load_element_now(key_weight.as_slice(), channel, plan.reads_ahead);
            } else if place.number != VALUES {
                of_side = load_element_now(weight.as_slice(), channel, plan.reads_ahead);
            }
            of_side
        }
        ComptimeOption::None => load_element_now(weight.as_slice(), channel, plan.reads_ahead),
    }
}

/// A unit's cosines and sines, where heads are rotated.
#[cube]
fn read_tables<E: Float>(
    cos: ComptimeOption<&Tensor<E>>,
    sin: ComptimeOption<&Tensor<E>>,
    position: u32,
    pairs: u32,
    cosines: &mut Array<E>,
    sines: &mut Array<E>,
    #[comptime] plan: HeadsPlan,
) {
    #[unroll]
    for index in 0..plan.held {
        let pair = UNIT_POS + comptime!((index * plan.team.units) as u32);
        if pair < pairs {
            let at = position as usize * pairs as usize + pair as usize;
            #[comptime]
            match cos {
                ComptimeOption::Some(cos) => {
                    cosines[index] = load_element_now(cos.as_slice(), at, plan.reads_ahead);
                }
                ComptimeOption::None => {}
            }
            #[comptime]
            match sin {
                ComptimeOption::Some(sin) => {
                    sines[index] = load_element_now(sin.as_slice(), at, plan.reads_ahead);
                }
                ComptimeOption::None => {}
            }
        }
    }
}

/// Writes where a side is.
#[cube]
fn write<E: Float>(target: &mut ComptimeOption<OwnedTensor<E>>, at: usize, value: E) {
    #[comptime]
    match target {
        ComptimeOption::Some(target) => {
            target[at] = value;
        }
        ComptimeOption::None => {}
    }
}
