//! The end of a block and the beginning of the next: `stream' = (stream + norm(added)) · scalar` and `norm(stream')`.
//!
//! Budget: a float a part of the cube in shared memory, one vector of each operand in registers. Bound by latency: a row is
//! a few KB, which one cube reads three times, two of them from the cache. Every intermediate is rounded to the stream's
//! dtype where the model was trained with it so.

use crate::op::sums::{Team, cube_sum, sum_of_squares};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn residual<E: Float, N: Size>(
    stream: &Tensor<Vector<E, N>>,
    added: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    scalar: ComptimeOption<&Tensor<E>>,
    next_weight: ComptimeOption<&Tensor<Vector<E, N>>>,
    sum: &mut Tensor<Vector<E, N>>,
    normed: &mut Tensor<Vector<E, N>>,
    rows: u32,
    vectors: u32,
    columns: f32,
    epsilon: f32,
    #[comptime] team: Team,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    if CUBE_POS >= rows as usize {
        terminate!();
    }
    let row = CUBE_POS * vectors as usize;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));

    let mut squares = 0.0f32;
    let mut vector = UNIT_POS;
    while vector < vectors {
        squares += sum_of_squares(added[row + vector as usize]);
        vector += comptime!(team.units as u32);
    }
    let mean = cube_sum(squares, &mut partial, team) / columns;
    let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());

    let mut squares = 0.0f32;
    let mut vector = UNIT_POS;
    while vector < vectors {
        let at = row + vector as usize;
        let of_block = Vector::<f32, N>::cast_from(added[at])
            * factor
            * Vector::<f32, N>::cast_from(weight[vector as usize]);
        let of_block = Vector::<f32, N>::cast_from(Vector::<E, N>::cast_from(of_block));
        let mut both =
            Vector::<E, N>::cast_from(Vector::<f32, N>::cast_from(stream[at]) + of_block);
        #[comptime]
        match &scalar {
            ComptimeOption::Some(scalar) => {
                let scalar = Vector::<f32, N>::cast_from(f32::cast_from(scalar[0]));
                both = Vector::<E, N>::cast_from(Vector::<f32, N>::cast_from(both) * scalar);
            }
            ComptimeOption::None => {}
        }
        sum[at] = both;
        squares += sum_of_squares(both);
        vector += comptime!(team.units as u32);
    }

    #[comptime]
    match &next_weight {
        ComptimeOption::Some(next_weight) => {
            let mean = cube_sum(squares, &mut partial, team) / columns;
            let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());
            let mut vector = UNIT_POS;
            while vector < vectors {
                // The unit's own writes.
                let at = row + vector as usize;
                let value = Vector::<f32, N>::cast_from(sum[at])
                    * factor
                    * Vector::<f32, N>::cast_from(next_weight[vector as usize]);
                normed[at] = Vector::<E, N>::cast_from(value);
                vector += comptime!(team.units as u32);
            }
        }
        ComptimeOption::None => {}
    }
}
