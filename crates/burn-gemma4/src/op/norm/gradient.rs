//! The gradients of the RMS norm `y = x r w` with `r = 1 / √(mean(x²) + ε)`, where `g` is the gradient of `y`. The
//! gradient of `x` is `r (g w − x r² mean(g w x))`. The gradient of `w` is the sum of `g x r` over the rows.
//!
//! Budget: shared memory holds one partial sum per plane, or per unit without plane operations. Registers hold a vector
//! of each input, and the unit's vectors of `w`'s gradient.
//!
//! Schedule: each of `n` cubes processes every `n`-th row. A cube reads a row twice, the second time from the cache.
//! Each cube writes one partial sum of `w`'s gradient.
//!
//! Bound: memory bandwidth.

use super::kernel::NormScalars;
use crate::op::sums::{Team, cube_sum, sum_of_squares};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn norm_gradient<E: Float, W: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<W, N>>,
    gradient: &Tensor<Vector<E, N>>,
    of_input: &mut Tensor<Vector<E, N>>,
    of_weight: &mut Tensor<Vector<f32, N>>,
    scalars: NormScalars,
    #[comptime] vectors_per_unit: usize,
    #[comptime] team: Team,
    #[define(E, W)] _elements: [ElemType; 2],
    #[define(N)] _vector: usize,
) {
    let NormScalars {
        rows,
        vectors,
        columns,
        epsilon,
    } = scalars;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));
    let mut sums = Array::<Vector<f32, N>>::new(vectors_per_unit);
    #[unroll]
    for own in 0..vectors_per_unit {
        sums[own] = Vector::zeroed();
    }
    let mut index = CUBE_POS as u32;
    while index < rows {
        let row = index as usize * vectors as usize;
        let mut squares = 0.0f32;
        let mut dots = 0.0f32;
        #[unroll]
        for own in 0..vectors_per_unit {
            let vector = UNIT_POS + comptime!((own * team.units) as u32);
            if vector < vectors {
                let x = input[row + vector as usize];
                squares += sum_of_squares(x);
                let products = Vector::<f32, N>::cast_from(x)
                    * Vector::<f32, N>::cast_from(gradient[row + vector as usize])
                    * Vector::<f32, N>::cast_from(weight[vector as usize]);
                #[unroll]
                for component in 0..products.vector_size().comptime() {
                    dots += products.extract(component);
                }
            }
        }
        let mean = cube_sum(squares, &mut partial, team) / columns;
        let mean_dot = cube_sum(dots, &mut partial, team) / columns;
        let factor = 1.0f32 / (mean + epsilon).sqrt();
        let back = Vector::<f32, N>::cast_from(mean_dot * factor * factor);
        let factor = Vector::<f32, N>::cast_from(factor);
        #[unroll]
        for own in 0..vectors_per_unit {
            let vector = UNIT_POS + comptime!((own * team.units) as u32);
            if vector < vectors {
                let at = row + vector as usize;
                let x = Vector::<f32, N>::cast_from(input[at]);
                let g = Vector::<f32, N>::cast_from(gradient[at]);
                let w = Vector::<f32, N>::cast_from(weight[vector as usize]);
                of_input[at] = Vector::<E, N>::cast_from((g * w - x * back) * factor);
                sums[own] += g * x * factor;
            }
        }
        index += CUBE_COUNT as u32;
    }
    #[unroll]
    for own in 0..vectors_per_unit {
        let vector = UNIT_POS + comptime!((own * team.units) as u32);
        if vector < vectors {
            of_weight[CUBE_POS * vectors as usize + vector as usize] = sums[own];
        }
    }
}
