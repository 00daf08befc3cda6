//! Argmax of each row: the row's largest value, and the first column that has this value. The column is −1 if the row has
//! only −∞ and NaN.
//!
//! Algorithm: each row is divided into sections, and each cube reduces one section. A second launch with one cube per row
//! reduces the results of the sections.
//!
//! Budget: shared memory holds 8 bytes per unit. Registers hold up to [`HELD`] values and their columns. Schedule: a unit
//! issues the loads of up to [`HELD`] values at once. Bound: memory bandwidth.

use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile, mark_volatile_if_present};
use cubecl::prelude::*;

/// The number of units in a cube.
pub(super) const UNITS: usize = 128;

/// The largest number of values that a unit loads at once.
pub(super) const HELD: usize = 16;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn argmax_pdl<E: Float, I: Int>(
    values: &Tensor<E>,
    columns_of_values: ComptimeOption<&Tensor<I>>,
    largest: &mut Tensor<f32>,
    columns_of_largest: &mut Tensor<I>,
    rows: u32,
    columns: u32,
    stretches: u32,
    #[comptime] held: usize,
    #[comptime] pdl: bool,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    launch_dependents_and_wait(pdl);
    mark_volatile(values, pdl);
    mark_volatile_if_present(columns_of_values, pdl);
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
            // If a column lies beyond the end of the section, load the value at `column` instead, which is within the
            // section. With a branch, the compiler would not issue all loads before the first use.
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
            // Replace the best value only by a larger value, so that the first column of equal values stays. The initial best
            // value is f32::MIN, because WGSL has no −∞. The condition after `||` accepts a first value that equals f32::MIN.
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

/// Finds the largest of `count` values, and the smallest column with this value. `count` must be a power of two.
/// Afterwards element 0 of `values` and `columns` holds the result. Each step first synchronizes the cube, and then
/// halves the number of values.
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
