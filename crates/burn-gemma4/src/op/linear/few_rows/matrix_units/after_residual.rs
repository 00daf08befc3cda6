//! The product of one row that the kernel itself makes, in every cube: what [`residual`](crate::op::residual) makes of the stream and of a block's
//! output.
//!
//! Budget: as [`kernel`](super::kernel)'s, and in shared memory the row, and two floats for each warp; in registers a unit's vectors of the stream, of
//! what is added and of the norms' weights, of which a model's rows have one each. Bound by latency: it is a launch less, and what every cube reads for
//! it comes in the time that the row would take. Behind the launch before nothing is read that waits for another read; two barriers, three with
//! a norm of the sum. Sums have the order that `residual` has where a cube has a unit for each vector of the row.

use super::{
    super::{
        kernel::WeightStrides,
        sides::{Sides, side_of_cube},
        sums::{Epilogue, FactorPlace, Outputs, ProjectPlan, finish_parts},
    },
    kernel::{STEP_BYTES, multiply, read_weights, weight_address},
    parts::{lane, leave_parts},
};
use crate::op::sums::{Team, first_cube_sum, sum_of_squares};
use cube_kit::{
    ampere::{
        copy::{PIECE, PIECE_BYTES},
        few_rows::PIECE_COLUMNS,
    },
    hopper::Half,
    overlap::{
        await_previous, let_next_begin, load_element_now, load_now, was_written,
        was_written_if_there,
    },
};
use cubecl::prelude::*;

/// Pieces of a row that a step has.
const STEP_PIECES: usize = STEP_BYTES / PIECE_BYTES;

/// How a cube makes the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RowPlan {
    /// All units of a cube.
    pub team: Team,
    /// Vectors of the row.
    pub vectors: usize,
}

impl RowPlan {
    /// Vectors of a unit.
    fn held(self) -> usize {
        self.vectors.div_ceil(self.team.units)
    }
}

/// `sum = (stream + norm(added)) · scalar`, which the first cube writes, and the product of that, or of its norm, as `project_by_matrix_units`
/// has it. A vector is a piece.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_after_residual_overlapped<E: Float, N: Size>(
    stream: &Tensor<Vector<E, N>>,
    added: &Tensor<Vector<E, N>>,
    norm_weight: &Tensor<Vector<E, N>>,
    scalar: ComptimeOption<&Tensor<E>>,
    next_weight: ComptimeOption<&Tensor<Vector<E, N>>>,
    sum: &mut Tensor<Vector<E, N>>,
    weight: &Tensor<E>,
    second: ComptimeOption<&Tensor<E>>,
    third: ComptimeOption<&Tensor<E>>,
    factor: ComptimeOption<&Tensor<E>>,
    output: &mut Tensor<E>,
    factor_place: FactorPlace,
    sides: Sides,
    strides: WeightStrides,
    columns: f32,
    epsilon: f32,
    cap: f32,
    #[comptime] row_plan: RowPlan,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[comptime] half: Half,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    await_previous(comptime!(plan.overlaps && !plan.reads_ahead));
    let side = side_of_cube(CUBE_POS as u32, sides, plan);
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
            weight, second, third, strides, side, first, lane, column, fragment, plan,
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
    make_row::<E, N>(
        stream,
        added,
        norm_weight,
        scalar,
        next_weight,
        sum,
        &mut row,
        columns,
        epsilon,
        row_plan,
        plan,
    );
    was_written_if_there(factor, plan.overlaps);
    sync_cube();

    let mut piece = (column / comptime!(PIECE as u32)) as usize;
    let mut rows = Array::<Vector<u32, Const<4>>>::new(plan.unroll);
    // From a block of the warp's to its next.
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
    let_next_begin(plan.overlaps);
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
        factor_place,
        cap,
    };
    finish_parts(&partial, &factor, output, of_outputs, plan, epilogue);
}

/// The row, in shared memory; whoever reads it there syncs before. All rows of the left operand are it: only the first of the product's is read.
#[cube]
fn make_row<E: Float, N: Size>(
    stream: &Tensor<Vector<E, N>>,
    added: &Tensor<Vector<E, N>>,
    norm_weight: &Tensor<Vector<E, N>>,
    scalar: ComptimeOption<&Tensor<E>>,
    next_weight: ComptimeOption<&Tensor<Vector<E, N>>>,
    sum: &mut Tensor<Vector<E, N>>,
    row: &mut Shared<[Vector<u32, Const<4>>]>,
    columns: f32,
    epsilon: f32,
    #[comptime] row_plan: RowPlan,
    #[comptime] plan: ProjectPlan,
) {
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
            norm_weights[index] = load_now(norm_weight, vector as usize, plan.overlaps);
            #[comptime]
            match next_weight {
                ComptimeOption::Some(next_weight) => {
                    next_weights[index] = load_now(next_weight, vector as usize, plan.overlaps);
                }
                ComptimeOption::None => {}
            }
        }
    }
    let mut scale = E::new(1.0);
    #[comptime]
    match scalar {
        ComptimeOption::Some(scalar) => {
            scale = load_element_now(scalar.as_slice(), 0usize, plan.overlaps);
        }
        ComptimeOption::None => {}
    }
    await_previous(plan.reads_ahead);
    was_written(stream, plan.overlaps);
    was_written(added, plan.overlaps);
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
    let mean = first_cube_sum(squares, &mut partial, row_plan.team) / columns;
    let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());
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
            match &scalar {
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
    match &next_weight {
        ComptimeOption::Some(_) => {
            // Of its own: someone may still be reading the first sum's parts.
            let mut partial = Shared::<[f32]>::new_slice(comptime!(row_plan.team.parts()));
            let mean = first_cube_sum(squares, &mut partial, row_plan.team) / columns;
            let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());
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
