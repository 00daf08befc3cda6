//! GEMV on NVIDIA's tensor cores: `output[r, o] = Σ input[r, i] · weight[o, i]`, accumulated in f32.
//!
//! Algorithm: `n` warps together compute 8 or 16 outputs of a matrix. In a gated GEMV they compute 8 outputs of the
//! gate projection and 8 of the up projection. Each warp multiplies every `n`-th block of the inner dimension. A block
//! is the range of columns whose weights a warp keeps in flight. The warps' partial sums are added up in a fixed order,
//! so every run gives the same bits.
//!
//! Budget: shared memory holds the warps' sums, at most 8 KB. For each fragment of 8 weight rows, registers hold
//! `4 · unroll` words of weights and 4 sums. The weights of all fragments take at most 64 registers. The input takes at
//! most 64 more.
//!
//! Schedule: each thread loads 16 bytes of weights at once, directly into its fragment, and has `unroll` such loads per
//! fragment in flight. As soon as a step has been multiplied, the loop loads weights of the next block into the step's
//! registers.
//!
//! Bound: memory bandwidth. Every warp reads the input rows from the cache.

use super::super::concat::{Side, WeightMatrices, side_of_cube};
use super::super::kernel::WeightStrides;
use super::super::sums::{Epilogue, EpilogueInputs, Outputs, ProjectPlan, finish_parts};
use super::parts::{Lane, lane, leave_parts, weight_row};
use cube_kit::ampere::cp_async::{PIECE, PIECE_BYTES, half_address};
use cube_kit::ampere::gemv::{PIECE_COLUMNS, add_pairs, read_piece_if, stream};
use cube_kit::nvidia::Half;
use cube_kit::pdl::{launch_dependents, mark_owned_volatile_if_present, wait_prior_launch};
use cubecl::prelude::*;

/// The number of 32-bit words in the 16-byte piece that a thread loads at once.
const WORDS: usize = PIECE_BYTES / 4;

/// The number of bytes of a weight row in a step. A step is the columns that a warp multiplies at once.
pub(super) const STEP_BYTES: usize = 2 * PIECE_COLUMNS;

/// Multiplies `input` by the transposes of the matrices. If `plan.gated`, multiplies the second matrix's output by the
/// GELU of the first matrix's output. Otherwise concatenates the outputs. Strides are in units of 16 bytes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_by_matrix_units_pdl<E: Float>(
    input: &Tensor<E>,
    matrices: WeightMatrices<OwnedTensor<E>>,
    strides: WeightStrides,
    epilogue_inputs: EpilogueInputs<E>,
    output: &mut Tensor<E>,
    columns: u32,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[comptime] half: Half,
    #[define(E)] _element: ElemType,
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
    wait_prior_launch(plan.reads_ahead);
    mark_owned_volatile_if_present(&epilogue_inputs.factor, plan.pdl);

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
    // The distance in columns between consecutive blocks of a warp. A block is the range of columns whose weights a
    // warp keeps in flight.
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

/// Returns the address of the first weight that the thread reads for a fragment. A fragment is 8 weight rows.
#[cube]
pub(super) fn weight_address<E: Float>(
    matrices: &WeightMatrices<OwnedTensor<E>>,
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
        address_if_there::<E>(&matrices.second, row, strides.second, column)
    } else {
        let mut found = address::<E>(&matrices.first, row, strides.weight, column);
        if comptime!(plan.sides > 1) {
            if side.number == 1u32 {
                found = address_if_there::<E>(&matrices.second, row, strides.second, column);
            } else if side.number == 2u32 {
                found = address_if_there::<E>(&matrices.third, row, strides.third, column);
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
    matrix: &ComptimeOption<OwnedTensor<E>>,
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

/// Issues the loads of the weights of one step, for all fragments. A step is the columns that a warp multiplies at
/// once.
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
