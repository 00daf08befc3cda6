//! `norm` of rows: `x / √(mean(x²) + ε) · weight`.
//!
//! Budget: a float a part of the cube in shared memory, one vector of each operand in registers. Bound by memory's rate
//! where there are many rows: a cube reads its row twice, the second time from the cache, and writes it once.

use crate::op::sums::{Team, cube_sum, sum_of_squares};
use cube_kit::overlap::{take_turn, was_written};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn norm_overlapped<E: Float, W: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    weight: ComptimeOption<&Tensor<Vector<W, N>>>,
    output: &mut Tensor<Vector<E, N>>,
    rows: u32,
    vectors: u32,
    columns: f32,
    epsilon: f32,
    #[comptime] team: Team,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(W)] _weight_element: ElemType,
    #[define(N)] _vector: usize,
) {
    take_turn(overlaps);
    was_written(input, overlaps);
    if CUBE_POS >= rows as usize {
        terminate!();
    }
    let row = CUBE_POS * vectors as usize;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));

    let mut squares = 0.0f32;
    let mut vector = UNIT_POS;
    while vector < vectors {
        squares += sum_of_squares(input[row + vector as usize]);
        vector += comptime!(team.units as u32);
    }
    let mean = cube_sum(squares, &mut partial, team) / columns;
    let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());

    let mut vector = UNIT_POS;
    while vector < vectors {
        let at = row + vector as usize;
        let mut value = Vector::<f32, N>::cast_from(input[at]) * factor;
        #[comptime]
        match &weight {
            ComptimeOption::Some(weight) => {
                value *= Vector::<f32, N>::cast_from(weight[vector as usize]);
            }
            ComptimeOption::None => {}
        }
        output[at] = Vector::<E, N>::cast_from(value);
        vector += comptime!(team.units as u32);
    }
}
