//! `norm` of rows: `x / √(mean(x²) + ε) · weight`.
//!
//! Budget: a float a part of the cube in shared memory, in registers a unit's vectors of each operand, as [`residual`](super::super::residual) has
//! them. Bound by memory's rate where there are many rows, and of one by latency: a cube reads its row once, and no read waits for another.

use crate::op::sums::{Team, first_cube_sum, sum_of_squares};
use cube_kit::overlap::{take_turn, was_written, was_written_if_there};
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
    #[comptime] held: usize,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(W)] _weight_element: ElemType,
    #[define(N)] _vector: usize,
) {
    take_turn(overlaps);
    was_written(input, overlaps);
    was_written_if_there(weight, overlaps);
    if CUBE_POS >= rows as usize {
        terminate!();
    }
    let row = CUBE_POS * vectors as usize;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));

    let mut values = Array::<Vector<E, N>>::new(held);
    let mut weights = Array::<Vector<W, N>>::new(held);
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            values[index] = input[row + vector as usize];
            #[comptime]
            match &weight {
                ComptimeOption::Some(weight) => {
                    weights[index] = weight[vector as usize];
                }
                ComptimeOption::None => {}
            }
        }
    }
    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        if UNIT_POS + comptime!((index * team.units) as u32) < vectors {
            squares += sum_of_squares(values[index]);
        }
    }
    let mean = first_cube_sum(squares, &mut partial, team) / columns;
    let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());

    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            let mut value = Vector::<f32, N>::cast_from(values[index]) * factor;
            #[comptime]
            match &weight {
                ComptimeOption::Some(_) => {
                    value *= Vector::<f32, N>::cast_from(weights[index]);
                }
                ComptimeOption::None => {}
            }
            output[row + vector as usize] = Vector::<E, N>::cast_from(value);
        }
    }
}
