//! The argmax of each row: its largest number and the first column that has it; −1 for a row of which none is a number
//! above −∞.
//!
//! Budget: 8 bytes a unit in shared memory, in registers up to [`HELD`] values and their columns. Bound by memory: reads the logits once, all
//! that a unit has of a stretch at once. Cubes reduce a stretch of a row each, then one cube a row reduces what they found.

use cube_kit::overlap::{take_turn, was_written, was_written_if_there};
use cubecl::prelude::*;

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// Values that a unit reads at once at most.
pub(super) const HELD: usize = 16;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn argmax_overlapped<E: Float, I: Int>(
    values: &Tensor<E>,
    columns_of_values: ComptimeOption<&Tensor<I>>,
    largest: &mut Tensor<f32>,
    columns_of_largest: &mut Tensor<I>,
    rows: u32,
    columns: u32,
    stretches: u32,
    #[comptime] held: usize,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    take_turn(overlaps);
    was_written(values, overlaps);
    was_written_if_there(columns_of_values, overlaps);
    let row = CUBE_POS as u32 / stretches;
    if row >= rows {
        terminate!();
    }
    let stretch = CUBE_POS as u32 % stretches;
    let length = columns.div_ceil(stretches);
    let end = min((stretch + 1u32) * length, columns);
    let mut best = f32::new(f32::MIN);
    let mut best_column = u32::MAX.runtime();
    let mut column = stretch * length + UNIT_POS;
    let mut held_values = Array::<E>::new(held);
    let mut held_places = Array::<I>::new(held);
    while column < end {
        let first = row as usize * columns as usize;
        #[unroll]
        for index in 0..held {
            // Behind the end the first is read again, which is not larger than itself: a branch would be between this read and the next.
            let other = column + comptime!((index * UNITS) as u32);
            let at = first + select(other < end, other, column) as usize;
            held_values[index] = values[at];
            #[comptime]
            match &columns_of_values {
                ComptimeOption::Some(of_values) => {
                    held_places[index] = of_values[at];
                }
                ComptimeOption::None => {}
            }
        }
        #[unroll]
        for index in 0..held {
            let value = f32::cast_from(held_values[index]);
            // The columns of one unit come in their order. The least number that there is, is one, too, and WGSL has no −∞ to begin with.
            if value > best || (value == best && best_column == u32::MAX) {
                best = value;
                best_column = column + comptime!((index * UNITS) as u32);
                #[comptime]
                match &columns_of_values {
                    ComptimeOption::Some(_) => {
                        let place = held_places[index];
                        best_column = select(place < I::new(0), u32::MAX, u32::cast_from(place));
                    }
                    ComptimeOption::None => {}
                }
            }
        }
        column += comptime!((held * UNITS) as u32);
    }

    let mut found = Shared::<[f32]>::new_slice(UNITS);
    let mut found_columns = Shared::<[u32]>::new_slice(UNITS);
    found[UNIT_POS as usize] = best;
    found_columns[UNIT_POS as usize] = best_column;
    bring_best_first(&mut found, &mut found_columns, UNITS);
    if UNIT_POS == 0 {
        largest[CUBE_POS] = found[0];
        let column = found_columns[0];
        let missing = column == u32::MAX;
        let place = I::cast_from(select(missing, 0u32, column));
        columns_of_largest[CUBE_POS] = select(missing, I::new(-1), place);
    }
}

/// Brings the largest of so many values, a power of two, and the smallest column that has it, to the first place, where unit 0 finds them. Syncs first.
#[cube]
pub(crate) fn bring_best_first(
    values: &mut Shared<[f32]>,
    columns: &mut Shared<[u32]>,
    #[comptime] count: usize,
) {
    let mut half = comptime!(count as u32 / 2).runtime();
    while half > 0u32 {
        sync_cube();
        if UNIT_POS < half {
            let other = values[(UNIT_POS + half) as usize];
            let other_column = columns[(UNIT_POS + half) as usize];
            let own = values[UNIT_POS as usize];
            let own_column = columns[UNIT_POS as usize];
            if other > own || (other == own && other_column < own_column) {
                values[UNIT_POS as usize] = other;
                columns[UNIT_POS as usize] = other_column;
            }
        }
        half /= 2u32;
    }
}
