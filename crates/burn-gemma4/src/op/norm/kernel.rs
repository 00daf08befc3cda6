//! The RMS norm of rows: `x / √(mean(x²) + ε) · weight`.
//!
//! Budget: shared memory holds one partial sum per plane, or per unit without plane operations. Registers hold a unit's
//! vectors of each input, as in [`residual`](super::super::residual).
//!
//! Bound: memory bandwidth for many rows, latency for a single row. A cube reads its row once.

use crate::op::sums::{Team, first_cube_sum, sum_of_squares};
use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile, mark_volatile_if_present};
use cubecl::prelude::*;

/// The scalars of an RMS norm over rows.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(in crate::op) struct NormScalars {
    pub rows: u32,
    /// The number of vectors per row.
    pub vectors: u32,
    /// The number of columns per row. The norm divides the sum of squares by this number.
    pub columns: f32,
    pub epsilon: f32,
}

/// The compile-time plan of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NormPlan {
    pub team: Team,
    /// The largest number of vectors of a row that a unit keeps in registers.
    pub held: usize,
    pub pdl: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn norm_pdl<E: Float, W: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    weight: ComptimeOption<&Tensor<Vector<W, N>>>,
    output: &mut Tensor<Vector<E, N>>,
    scalars: NormScalars,
    #[comptime] plan: NormPlan,
    #[define(E, W)] _elements: [ElemType; 2],
    #[define(N)] _vector: usize,
) {
    let NormScalars {
        rows,
        vectors,
        columns,
        epsilon,
    } = scalars;
    launch_dependents_and_wait(plan.pdl);
    mark_volatile(input, plan.pdl);
    mark_volatile_if_present(weight, plan.pdl);
    if CUBE_POS >= rows as usize {
        terminate!();
    }
    let (team, held) = comptime!((plan.team, plan.held));
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
