//! The end of a block and the beginning of the next: `stream' = (stream + norm(added)) · scalar` and `norm(stream')`.
//!
//! Budget: two floats a part of the cube in shared memory, in registers a unit's vectors of each operand, of which a team for rows of
//! models has one to three, and up to twenty without plane operations, where teams are small. Bound by latency: a row is a few KB,
//! which one cube reads once. Behind the launch before nothing is read that waits for another read, and each of both sums has one
//! barrier. Every intermediate is rounded to the stream's dtype where the model was trained with it so.

use crate::op::sums::{Team, first_cube_sum, sum_of_squares};
use cube_kit::overlap::{
    await_previous, let_next_begin, load_element_now, load_now, was_written, was_written_if_there,
};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn residual_overlapped<E: Float, N: Size>(
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
    #[comptime] held: usize,
    #[comptime] overlaps: bool,
    #[comptime] reads_ahead: bool,
    #[comptime] loads_now: bool,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let_next_begin(overlaps);
    let reads_behind = comptime!(overlaps && !reads_ahead);
    await_previous(reads_behind);
    was_written(weight, reads_behind);
    was_written_if_there(scalar, reads_behind);
    was_written_if_there(next_weight, reads_behind);
    let row = CUBE_POS * vectors as usize;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));

    // What a unit needs is on its way at once, but for what it waits for.
    let mut blocks = Array::<Vector<E, N>>::new(held);
    let mut streams = Array::<Vector<E, N>>::new(held);
    let mut weights = Array::<Vector<E, N>>::new(held);
    let mut next_weights = Array::<Vector<E, N>>::new(held);
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            weights[index] = load_now(weight, vector as usize, loads_now);
            #[comptime]
            match next_weight {
                ComptimeOption::Some(next_weight) => {
                    next_weights[index] = load_now(next_weight, vector as usize, loads_now);
                }
                ComptimeOption::None => {}
            }
        }
    }
    let mut scale = E::new(1.0);
    #[comptime]
    match scalar {
        ComptimeOption::Some(scalar) => {
            scale = load_element_now(scalar.as_slice(), 0usize, loads_now);
        }
        ComptimeOption::None => {}
    }
    await_previous(reads_ahead);
    was_written(stream, overlaps);
    was_written(added, overlaps);
    if CUBE_POS >= rows as usize {
        terminate!();
    }
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            blocks[index] = added[row + vector as usize];
            streams[index] = stream[row + vector as usize];
        }
    }

    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        if UNIT_POS + comptime!((index * team.units) as u32) < vectors {
            squares += sum_of_squares(blocks[index]);
        }
    }
    let mean = first_cube_sum(squares, &mut partial, team) / columns;
    let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());

    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            let of_block = Vector::<f32, N>::cast_from(blocks[index])
                * factor
                * Vector::<f32, N>::cast_from(weights[index]);
            let of_block = Vector::<f32, N>::cast_from(Vector::<E, N>::cast_from(of_block));
            let mut both =
                Vector::<E, N>::cast_from(Vector::<f32, N>::cast_from(streams[index]) + of_block);
            #[comptime]
            match &scalar {
                ComptimeOption::Some(_) => {
                    let scale = Vector::<f32, N>::cast_from(f32::cast_from(scale));
                    both = Vector::<E, N>::cast_from(Vector::<f32, N>::cast_from(both) * scale);
                }
                ComptimeOption::None => {}
            }
            sum[row + vector as usize] = both;
            streams[index] = both;
            squares += sum_of_squares(both);
        }
    }

    #[comptime]
    match &next_weight {
        ComptimeOption::Some(_) => {
            // Of its own: someone may still be reading the first sum's parts.
            let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));
            let mean = first_cube_sum(squares, &mut partial, team) / columns;
            let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());
            #[unroll]
            for index in 0..held {
                let vector = UNIT_POS + comptime!((index * team.units) as u32);
                if vector < vectors {
                    let value = Vector::<f32, N>::cast_from(streams[index])
                        * factor
                        * Vector::<f32, N>::cast_from(next_weights[index]);
                    normed[row + vector as usize] = Vector::<E, N>::cast_from(value);
                }
            }
        }
        ComptimeOption::None => {}
    }
}
