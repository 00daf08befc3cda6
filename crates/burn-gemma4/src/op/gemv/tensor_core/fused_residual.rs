//! GEMV of one row of the residual stream, fused with the preceding residual addition of
//! [`residual`](crate::op::residual).
//!
//! Algorithm: each CTA issues the loads of its weights, computes the whole row in shared memory, and multiplies as
//! [`kernel`](super::kernel) does. If a CTA has at least one thread per vector, the row has the same bits as the row
//! that `residual` computes.
//!
//! Budget: shared memory holds the warps' sums as in [`kernel`](super::kernel), the row, and two floats for each warp.
//! Registers hold the weights and sums of [`kernel`](super::kernel), and the thread's vectors of the stream, the
//! block's output and the norms' weights.
//!
//! Schedule: after the wait for the previous launch, no read depends on another read. A CTA synchronizes at most three
//! times before the products.
//!
//! Bound: latency. The fusion saves a launch.

use super::super::concat::{WeightMatrices, side_of_cube};
use super::super::kernel::WeightStrides;
use super::super::sums::{Epilogue, EpilogueInputs, Outputs, ProjectPlan, finish_parts};
use super::kernel::{STEP_BYTES, multiply, read_weights, weight_address};
use super::parts::{lane, leave_parts};
use crate::op::sums::{Team, first_cube_sum, sum_of_squares};
use cube_kit::ampere::cp_async::{PIECE, PIECE_BYTES};
use cube_kit::ampere::gemv::PIECE_COLUMNS;
use cube_kit::nvidia::Half;
use cube_kit::pdl::{
    launch_dependents, load_element_now, load_now, mark_owned_volatile_if_present, mark_volatile,
    wait_prior_launch,
};
use cubecl::prelude::*;

/// The number of 16-byte pieces in a step. A step is the range of columns that a warp multiplies at once.
const STEP_PIECES: usize = STEP_BYTES / PIECE_BYTES;

/// The division of the stream's row among the threads of a CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RowPlan {
    /// All threads of the CTA, which reduce the row together.
    pub team: Team,
    /// The number of vectors in the row.
    pub vectors: usize,
}

impl RowPlan {
    /// The largest number of the row's vectors that a thread holds in registers.
    fn held(self) -> usize {
        self.vectors.div_ceil(self.team.units)
    }
}

/// The inputs of the residual addition. The stream, the block's output and the norm weights have the same number of
/// columns.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ResidualInputs<E: Float, N: Size> {
    /// The residual stream, `[1, columns]`.
    pub stream: OwnedTensor<Vector<E, N>>,
    /// The block's output, `[1, columns]`.
    pub added: OwnedTensor<Vector<E, N>>,
    /// The weight of the norm of the block's output, `[columns]`.
    pub norm_weight: OwnedTensor<Vector<E, N>>,
    /// The scalar factor of the sum, `[1]`.
    pub scalar: ComptimeOption<OwnedTensor<E>>,
    /// The weight of the sum's norm, `[columns]`.
    pub next_weight: ComptimeOption<OwnedTensor<Vector<E, N>>>,
    pub columns: f32,
    pub epsilon: f32,
}

/// Computes `sum = (stream + norm(added)) · scalar`. Then multiplies the sum, or its norm, by the weights as
/// [`project_by_matrix_units_pdl`](super::kernel::project_by_matrix_units_pdl) does. The first CTA also writes the sum
/// to the tensor `sum`. A vector is 16 bytes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_after_residual_pdl<E: Float, N: Size>(
    residual_inputs: ResidualInputs<E, N>,
    sum: &mut Tensor<Vector<E, N>>,
    matrices: WeightMatrices<OwnedTensor<E>>,
    strides: WeightStrides,
    epilogue_inputs: EpilogueInputs<E>,
    output: &mut Tensor<E>,
    #[comptime] row_plan: RowPlan,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[comptime] half: Half,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    wait_prior_launch(comptime!(plan.pdl && !plan.reads_ahead));
    let side = side_of_cube(CUBE_POS as u32, matrices.rows, plan.sides);
    let team = side.cube * comptime!(plan.teams as u32) + UNIT_POS_Y;
    let first = team * comptime!(plan.outputs as u32);
    let lane = lane();
    let of_block = comptime!(plan.unroll * PIECE_COLUMNS);
    let column = lane.warp * comptime!(of_block as u32) + lane.column * comptime!(PIECE as u32);

    let fragments = comptime!(plan.fragments());
    let mut addresses = Array::<u64>::new(fragments);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(fragments);
    #[unroll]
    for fragment in 0..fragments {
        addresses[fragment] = weight_address::<E>(
            &matrices, strides, side, first, lane, column, fragment, plan,
        );
        sums[fragment] = Vector::<f32, Const<4>>::zeroed();
    }
    let mut weights = Array::<Vector<u32, Const<4>>>::new(comptime!(plan.unroll * fragments));
    #[unroll]
    for step in 0..plan.unroll {
        read_weights(&mut weights, &addresses, step, plan);
    }

    let vectors = comptime!(row_plan.vectors);
    let mut row = Shared::<[Vector<u32, Const<4>>]>::new_slice(vectors);
    make_row::<E, N>(&residual_inputs, sum, &mut row, row_plan, plan);
    mark_owned_volatile_if_present(&epilogue_inputs.factor, plan.pdl);
    sync_cube();

    let mut piece = (column / comptime!(PIECE as u32)) as usize;
    let mut rows = Array::<Vector<u32, Const<4>>>::new(plan.unroll);
    // The distance in columns between consecutive blocks of a warp. A block is the range of columns whose weights a
    // warp keeps in flight.
    let block = comptime!(of_block * plan.team.parts());
    let blocks = comptime!(vectors * PIECE / block);
    #[unroll]
    for step in 0..plan.unroll {
        rows[step] = row[piece + comptime!(step * STEP_PIECES)];
    }
    let mut done = 1u32;
    while done < comptime!(blocks as u32) {
        #[unroll]
        for fragment in 0..fragments {
            addresses[fragment] += comptime!(2 * block as u64);
        }
        piece += comptime!(block / PIECE);
        #[unroll]
        for step in 0..plan.unroll {
            multiply(&mut sums, &rows, &weights, step, half, plan);
            read_weights(&mut weights, &addresses, step, plan);
            rows[step] = row[piece + comptime!(step * STEP_PIECES)];
        }
        done += 1u32;
    }
    launch_dependents(plan.pdl);
    #[unroll]
    for step in 0..plan.unroll {
        multiply(&mut sums, &rows, &weights, step, half, plan);
    }

    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.partials()));
    #[unroll]
    for fragment in 0..fragments {
        let sum = sums[fragment];
        leave_parts(
            &mut partial,
            sum.extract(0usize),
            sum.extract(1usize),
            lane,
            fragment,
            plan,
        );
    }
    let of_outputs = Outputs {
        row: 0u32,
        first,
        outputs: side.outputs,
        column: side.column,
        all_outputs: side.all_outputs,
    };
    finish_parts(
        &partial,
        &epilogue_inputs,
        output,
        of_outputs,
        plan,
        epilogue,
    );
}

/// Computes the row of the residual stream in shared memory. Callers must synchronize the CTA before they read the row.
/// The tensor-core products take 8 input rows, so the row is used as all 8 input rows.
#[cube]
fn make_row<E: Float, N: Size>(
    inputs: &ResidualInputs<E, N>,
    sum: &mut Tensor<Vector<E, N>>,
    row: &mut Shared<[Vector<u32, Const<4>>]>,
    #[comptime] row_plan: RowPlan,
    #[comptime] plan: ProjectPlan,
) {
    let stream = &inputs.stream;
    let added = &inputs.added;
    let held = comptime!(row_plan.held());
    let units = comptime!(row_plan.team.units);
    let vectors = comptime!(row_plan.vectors as u32);
    let mut blocks = Array::<Vector<E, N>>::new(held);
    let mut streams = Array::<Vector<E, N>>::new(held);
    let mut norm_weights = Array::<Vector<E, N>>::new(held);
    let mut next_weights = Array::<Vector<E, N>>::new(held);
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * units) as u32);
        if vector < vectors {
            norm_weights[index] = load_now(&inputs.norm_weight, vector as usize, plan.pdl);
            #[comptime]
            match &inputs.next_weight {
                ComptimeOption::Some(next_weight) => {
                    next_weights[index] = load_now(next_weight, vector as usize, plan.pdl);
                }
                ComptimeOption::None => {}
            }
        }
    }
    let mut scale = E::new(1.0);
    #[comptime]
    match &inputs.scalar {
        ComptimeOption::Some(scalar) => {
            scale = load_element_now(scalar.as_slice(), 0usize, plan.pdl);
        }
        ComptimeOption::None => {}
    }
    wait_prior_launch(plan.reads_ahead);
    mark_volatile(stream, plan.pdl);
    mark_volatile(added, plan.pdl);
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * units) as u32);
        if vector < vectors {
            blocks[index] = added[vector as usize];
            streams[index] = stream[vector as usize];
        }
    }
    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        if UNIT_POS + comptime!((index * units) as u32) < vectors {
            squares += sum_of_squares(blocks[index]);
        }
    }
    let mut partial = Shared::<[f32]>::new_slice(comptime!(row_plan.team.parts()));
    let mean = first_cube_sum(squares, &mut partial, row_plan.team) / inputs.columns;
    let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + inputs.epsilon).sqrt());
    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * units) as u32);
        if vector < vectors {
            let of_block = Vector::<f32, N>::cast_from(blocks[index])
                * factor
                * Vector::<f32, N>::cast_from(norm_weights[index]);
            let of_block = Vector::<f32, N>::cast_from(Vector::<E, N>::cast_from(of_block));
            let mut both =
                Vector::<E, N>::cast_from(Vector::<f32, N>::cast_from(streams[index]) + of_block);
            #[comptime]
            match &inputs.scalar {
                ComptimeOption::Some(_) => {
                    let scale = Vector::<f32, N>::cast_from(f32::cast_from(scale));
                    both = Vector::<E, N>::cast_from(Vector::<f32, N>::cast_from(both) * scale);
                }
                ComptimeOption::None => {}
            }
            if CUBE_POS == 0 {
                sum[vector as usize] = both;
            }
            streams[index] = both;
            squares += sum_of_squares(both);
        }
    }
    #[comptime]
    match &inputs.next_weight {
        ComptimeOption::Some(_) => {
            // Reduce the second norm in a separate buffer, because other threads may still read the partial sums of the
            // first norm.
            let mut partial = Shared::<[f32]>::new_slice(comptime!(row_plan.team.parts()));
            let mean = first_cube_sum(squares, &mut partial, row_plan.team) / inputs.columns;
            let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + inputs.epsilon).sqrt());
            #[unroll]
            for index in 0..held {
                let vector = UNIT_POS + comptime!((index * units) as u32);
                if vector < vectors {
                    let value = Vector::<f32, N>::cast_from(streams[index])
                        * factor
                        * Vector::<f32, N>::cast_from(next_weights[index]);
                    streams[index] = Vector::<E, N>::cast_from(value);
                }
            }
        }
        ComptimeOption::None => {}
    }
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * units) as u32);
        if vector < vectors {
            row[vector as usize] = Vector::<u32, Const<4>>::reinterpret(streams[index]);
        }
    }
}
