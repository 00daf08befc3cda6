//! The RMS norm of rows: `x / √(mean(x²) + ε) · weight`.
//!
//! Budget: shared memory holds one partial sum per plane, or per unit without plane operations. Registers hold a unit's vectors
//! of each input, as in [`residual`](super::super::residual).
//!
//! Bound: memory bandwidth for many rows, latency for a single row. A cube reads its row once, and no read depends on another.

use crate::op::sums::{Team, first_cube_sum, sum_of_squares};
use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile, mark_volatile_if_present};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn norm_pdl<E: Float, W: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    weight: ComptimeOption<&Tensor<Vector<W, N>>>,
    output: &mut Tensor<Vector<E, N>>,
    rows: u32,
    vectors: u32,
    columns: f32,
    epsilon: f32,
    #[comptime] team: Team,
    #[comptime] held: usize,
    #[comptime] pdl: bool,
    #[define(E)] _element: ElemType,
    #[define(W)] _weight_element: ElemType,
    #[define(N)] _vector: usize,
) {
    launch_dependents_and_wait(pdl);
    mark_volatile(input, pdl);
    mark_volatile_if_present(weight, pdl);
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
