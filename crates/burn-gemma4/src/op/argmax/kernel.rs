//! The argmax of each row: its largest number and the first column that has it; −1 for a row of which none is a number
//! above −∞.
//!
//! Budget: 8 bytes a unit in shared memory. Bound by memory: reads the logits once. Cubes reduce a stretch of a row each,
//! then one cube a row reduces what they found.

use cube_kit::overlap::{take_turn, was_written, was_written_if_there};
use cubecl::prelude::*;

/// Units of a cube.
pub(super) const UNITS: usize = 128;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn argmax_overlapped<E: Float, I: Int>(
    values: &Tensor<E>,
    columns_of_values: ComptimeOption<&Tensor<I>>,
    largest: &mut Tensor<f32>,
    columns_of_largest: &mut Tensor<I>,
    columns: u32,
    stretches: u32,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    take_turn(overlaps);
    was_written(values, overlaps);
    was_written_if_there(columns_of_values, overlaps);
    let row = CUBE_POS as u32 / stretches;
    let stretch = CUBE_POS as u32 % stretches;
    let length = columns.div_ceil(stretches);
    let end = min((stretch + 1u32) * length, columns);
    let mut best = f32::new(f32::MIN);
    let mut best_column = u32::MAX.runtime();
    let mut column = stretch * length + UNIT_POS;
    while column < end {
        let at = row as usize * columns as usize + column as usize;
        let value = f32::cast_from(values[at]);
        // The columns of one unit come in their order.
        if value > best {
            best = value;
            best_column = column;
        }
        column += comptime!(UNITS as u32);
    }
    #[comptime]
    match &columns_of_values {
        ComptimeOption::Some(of_values) => {
            if best_column < columns {
                let at = row as usize * columns as usize + best_column as usize;
                let place = of_values[at];
                best_column = select(place < I::new(0), u32::MAX, u32::cast_from(place));
            }
        }
        ComptimeOption::None => {}
    }

    let mut found = Shared::<[f32]>::new_slice(UNITS);
    let mut found_columns = Shared::<[u32]>::new_slice(UNITS);
    found[UNIT_POS as usize] = best;
    found_columns[UNIT_POS as usize] = best_column;
    let mut half = comptime!(UNITS as u32 / 2).runtime();
    while half > 0u32 {
        sync_cube();
        if UNIT_POS < half {
            let other = found[(UNIT_POS + half) as usize];
            let other_column = found_columns[(UNIT_POS + half) as usize];
            let own = found[UNIT_POS as usize];
            let own_column = found_columns[UNIT_POS as usize];
            if other > own || (other == own && other_column < own_column) {
                found[UNIT_POS as usize] = other;
                found_columns[UNIT_POS as usize] = other_column;
            }
        }
        half /= 2u32;
    }
    if UNIT_POS == 0 {
        largest[CUBE_POS] = found[0];
        let column = found_columns[0];
        let missing = column == u32::MAX;
        let place = I::cast_from(select(missing, 0u32, column));
        columns_of_largest[CUBE_POS] = select(missing, I::new(-1), place);
    }
}
