//! The residual addition and the next norm: `stream' = (stream + norm(added)) · scalar` and `norm(stream')`. `added` is
//! the output of a block.
//!
//! Budget: shared memory holds one partial sum per plane for each of the two norms. Registers hold a unit's vectors of
//! each input, one to three vectors for the supported models. Without plane operations, shared memory holds one partial
//! sum per unit, and a unit holds up to twenty vectors of each input.
//!
//! Schedule: one cube per row, with one barrier per norm. The kernel rounds intermediate results to the stream's dtype
//! wherever the model rounded them in training.
//!
//! Bound: latency. A row has a few KB, and one cube reads the row once.

use crate::op::norm::kernel::NormScalars;
use crate::op::sums::{Team, first_cube_sum, sum_of_squares};
use cube_kit::pdl::{
    launch_dependents, load_element_now, load_now, mark_volatile, mark_volatile_if_present,
    wait_prior_launch,
};
use cubecl::prelude::*;

/// The compile-time plan of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ResidualPlan {
    pub team: Team,
    /// The largest number of vectors of a row that a unit keeps in registers.
    pub held: usize,
    pub pdl: bool,
    /// True if the kernel reads the weights and the scalar before the previous launch has ended. The device must
    /// support PDL, and no launch may write these parameters.
    pub reads_ahead: bool,
    /// True if the vector loads of the parameters must be issued before the wait for the previous launch: see
    /// `load_now` in `cube_kit::pdl`. This requires `reads_ahead`, and vectors of exactly `LOAD_BYTES` bytes. The
    /// compiler may move vector loads of other sizes behind the wait.
    pub loads_now: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn residual_pdl<E: Float, N: Size>(
    stream: &Tensor<Vector<E, N>>,
    added: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    scalar: ComptimeOption<&Tensor<E>>,
    next_weight: ComptimeOption<&Tensor<Vector<E, N>>>,
    sum: &mut Tensor<Vector<E, N>>,
    normed: &mut Tensor<Vector<E, N>>,
    scalars: NormScalars,
    #[comptime] plan: ResidualPlan,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let NormScalars {
        rows,
        vectors,
        columns,
        epsilon,
    } = scalars;
    let (team, held) = comptime!((plan.team, plan.held));
    launch_dependents(plan.pdl);
    let reads_behind = comptime!(plan.pdl && !plan.reads_ahead);
    wait_prior_launch(reads_behind);
    mark_volatile(weight, reads_behind);
    mark_volatile_if_present(scalar, reads_behind);
    mark_volatile_if_present(next_weight, reads_behind);
    let row = CUBE_POS * vectors as usize;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));

    // Issue all loads before the first use, except loads that must wait for the previous launch.
    let mut blocks = Array::<Vector<E, N>>::new(held);
    let mut streams = Array::<Vector<E, N>>::new(held);
    let mut weights = Array::<Vector<E, N>>::new(held);
    let mut next_weights = Array::<Vector<E, N>>::new(held);
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            weights[index] = load_now(weight, vector as usize, plan.loads_now);
            #[comptime]
            match next_weight {
                ComptimeOption::Some(next_weight) => {
                    next_weights[index] = load_now(next_weight, vector as usize, plan.loads_now);
                }
                ComptimeOption::None => {}
            }
        }
    }
    let mut scale = E::new(1.0);
    #[comptime]
    match scalar {
        ComptimeOption::Some(scalar) => {
            scale = load_element_now(scalar.as_slice(), 0usize, plan.loads_now);
        }
        ComptimeOption::None => {}
    }
    wait_prior_launch(plan.reads_ahead);
    mark_volatile(stream, plan.pdl);
    mark_volatile(added, plan.pdl);
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
            // Reduce the second norm in a separate buffer, because other units may still read the partial sums of the
            // first norm.
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
