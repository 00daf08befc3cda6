//! A few rows times the transpose of a weight matrix on NVIDIA's matrix units: `output[r, o] = Σ input[r, i] · weight[o, i]`, summed in f32.
//!
//! Budget: a float for each sum of each warp in shared memory, at most 8 KB; in registers `unroll` times 4 words for each 8 weight rows, at most 64, as
//! many for the input's at most, and 4 sums for each 8 weight rows, of which the matrix unit leaves half zero. Bound by memory: every weight is read once, by 16 bytes a
//! thread, straight into the matrix unit's registers, `unroll` times 2 of them in flight all the time: where one is multiplied, the next is on its way. The
//! input's rows are read from the cache by every warp. A warp has 8 or 16 outputs of a matrix, or 8 gates and what goes through them, and blocks of the inner
//! dimension; the warps of a team take turns at these, and their parts meet in shared memory, in the same order in every run.

use super::{
    super::{
        kernel::WeightStrides,
        sides::{Side, Sides, side_of_cube},
        sums::{Epilogue, FactorPlace, Outputs, ProjectPlan, finish_parts},
    },
    parts::{Lane, lane, leave_parts, weight_row},
};
use cube_kit::{
    ampere::{
        copy::{PIECE, PIECE_BYTES, half_address},
        few_rows::{PIECE_COLUMNS, add_pairs, read_piece_if, stream},
    },
    hopper::Half,
    overlap::{await_previous, let_next_begin, was_written_if_there},
};
use cubecl::prelude::*;

/// Words of a lane's 16 bytes.
const WORDS: usize = PIECE_BYTES / 4;

/// Bytes of a step of a row.
pub(super) const STEP_BYTES: usize = 2 * PIECE_COLUMNS;

/// `second` is what the first opens the gates of, or `second` and `third` have outputs beside the first's. Strides are in pieces.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_by_matrix_units_overlapped<E: Float>(
    input: &Tensor<E>,
    weight: &Tensor<E>,
    second: ComptimeOption<&Tensor<E>>,
    third: ComptimeOption<&Tensor<E>>,
    factor: ComptimeOption<&Tensor<E>>,
    output: &mut Tensor<E>,
    factor_place: FactorPlace,
    sides: Sides,
    strides: WeightStrides,
    columns: u32,
    cap: f32,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[comptime] half: Half,
    #[define(E)] _element: ElemType,
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
    await_previous(plan.reads_ahead);
    was_written_if_there(factor, plan.overlaps);

    let is_there = select(lane.row < comptime!(plan.rows as u32), 1u32, 0u32);
    let input_row = min(lane.row, comptime!(plan.rows as u32 - 1));
    let mut rows_address = half_address::<E>(
        input,
        u64::cast_from(input_row) * u64::cast_from(columns) + u64::cast_from(column),
    );
    let mut rows = Array::<Vector<u32, Const<4>>>::new(plan.unroll);
    #[unroll]
    for step in 0..plan.unroll {
        rows[step] = read_piece_if(rows_address, is_there, comptime!(step * STEP_BYTES));
    }
    // From a block of the warp's to its next.
    let block = comptime!(of_block * plan.team.parts());
    let blocks = columns / comptime!(block as u32);
    let mut done = 1u32;
    while done < blocks {
        #[unroll]
        for fragment in 0..fragments {
            addresses[fragment] += comptime!(2 * block as u64);
        }
        rows_address += comptime!(2 * block as u64);
        #[unroll]
        for step in 0..plan.unroll {
            multiply(&mut sums, &rows, &weights, step, half, plan);
            read_weights(&mut weights, &addresses, step, plan);
            rows[step] = read_piece_if(rows_address, is_there, comptime!(step * STEP_BYTES));
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

/// Where the lane's part of a fragment begins.
#[cube]
pub(super) fn weight_address<E: Float>(
    weight: &Tensor<E>,
    second: ComptimeOption<&Tensor<E>>,
    third: ComptimeOption<&Tensor<E>>,
    strides: WeightStrides,
    side: Side,
    first: u32,
    lane: Lane,
    column: u32,
    #[comptime] fragment: usize,
    #[comptime] plan: ProjectPlan,
) -> u64 {
    let row = weight_row(first, lane.row, side.outputs, fragment, plan);
    if comptime!(fragment >= plan.fragments_of_matrix()) {
        address_if_there::<E>(second, row, strides.second, column)
    } else {
        let mut found = address::<E>(weight, row, strides.weight, column);
        if comptime!(plan.sides > 1) {
            if side.number == 1u32 {
                found = address_if_there::<E>(second, row, strides.second, column);
            } else if side.number == 2u32 {
                found = address_if_there::<E>(third, row, strides.third, column);
            }
        }
        found
    }
}

#[cube]
fn address<E: Float>(matrix: &Tensor<E>, row: u32, stride: u32, column: u32) -> u64 {
    let start = u64::cast_from(row) * u64::cast_from(stride) * comptime!(PIECE as u64);
    half_address::<E>(matrix, start + u64::cast_from(column))
}

#[cube]
fn address_if_there<E: Float>(
    matrix: ComptimeOption<&Tensor<E>>,
    row: u32,
    stride: u32,
    column: u32,
) -> u64 {
    let mut found = 0u64;
    #[comptime]
    match matrix {
        ComptimeOption::Some(matrix) => {
            found = address::<E>(matrix, row, stride, column);
        }
        ComptimeOption::None => {}
    }
    found
}

/// Puts the weights of a step on their way.
#[cube]
pub(super) fn read_weights(
    weights: &mut Array<Vector<u32, Const<4>>>,
    addresses: &Array<u64>,
    #[comptime] step: usize,
    #[comptime] plan: ProjectPlan,
) {
    #[unroll]
    for fragment in 0..comptime!(plan.fragments()) {
        let offset = comptime!(step * STEP_BYTES);
        let place = comptime!(step * plan.fragments() + fragment);
        weights[place] = stream::<Const<4>>(addresses[fragment], offset, WORDS);
    }
}

#[cube]
pub(super) fn multiply(
    sums: &mut Array<Vector<f32, Const<4>>>,
    rows: &Array<Vector<u32, Const<4>>>,
    weights: &Array<Vector<u32, Const<4>>>,
    #[comptime] step: usize,
    #[comptime] half: Half,
    #[comptime] plan: ProjectPlan,
) {
    let row = rows[step];
    #[unroll]
    for pair in 0..comptime!(WORDS / 2) {
        let next = comptime!(2 * pair + 1);
        #[unroll]
        for fragment in 0..comptime!(plan.fragments()) {
            let weight = weights[comptime!(step * plan.fragments() + fragment)];
            sums[fragment] = add_pairs(
                sums[fragment],
                row.extract(comptime!(2 * pair)),
                row.extract(next),
                weight.extract(comptime!(2 * pair)),
                weight.extract(next),
                half,
            );
        }
    }
}
