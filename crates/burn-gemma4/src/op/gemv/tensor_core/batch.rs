//! GEMM of 9 to 64 input rows with float weights on NVIDIA's tensor cores:
//! `output[r, o] = Σ input[r, i] · weight[o, i]`, accumulated in f32. Decoding of several sequences uses this kernel,
//! except for GEMMs that the [`hopper`](super::super::hopper) kernel supports.
//!
//! Algorithm: a team of warps computes up to 32 outputs per input row. The warps of a team divide the inner dimension
//! among themselves. Each weight is read once, and multiplies all input rows. The input rows form row tiles of 16 rows.
//! [`kernel`](super::kernel) uses the same algorithm for at most 8 rows.
//!
//! Budget: shared memory holds the warps' sums of one row tile, at most 32 KB. A step is the 32 columns that a warp
//! multiplies at once. With 64 rows, the registers of a thread hold 64 sums, 32 words of weights, and 64 words of input
//! for two steps.
//!
//! Schedule: each thread keeps the weights of `unroll` steps in flight. While a thread multiplies one step, it loads
//! the input of the next step.
//!
//! Bound: memory bandwidth, up to about 32 rows. With more rows, the warps' reads of the input rows from the caches
//! take as long as the reads of the weights.

use super::super::concat::{Side, WeightMatrices, side_of_cube};
use super::super::kernel::WeightStrides;
use super::super::sums::{Epilogue, EpilogueInputs, Outputs, ProjectPlan, finish_parts};
use super::kernel::{STEP_BYTES, read_weights, weight_address};
use super::parts::{Lane, lane, leave_parts};
use cube_kit::ampere::cp_async::{PIECE, half_address};
use cube_kit::ampere::gemv::{PIECE_COLUMNS, PRODUCT_ROWS, add_pairs_of_two_rows, read_piece_if};
use cube_kit::nvidia::Half;
use cube_kit::pdl::{launch_dependents, mark_owned_volatile_if_present, wait_prior_launch};
use cubecl::prelude::*;

/// The number of rows in a row tile, which is the number of rows of the left operand of `mma.sync`.
pub(super) const TILE_ROWS: usize = 16;

/// The number of 16-byte pieces of input that a thread loads per row tile and step. A step is 32 columns. Lane `l` of a
/// warp loads a piece of row `l / 4`, and a piece of row `l / 4 + 8`.
const PIECES: usize = TILE_ROWS / PRODUCT_ROWS;

/// Computes the same as [`project_by_matrix_units_pdl`](super::kernel::project_by_matrix_units_pdl), for more than 8
/// input rows.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_batch_by_matrix_units_pdl<E: Float>(
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
    let tiles = comptime!(plan.row_tiles());
    let mut addresses = Array::<u64>::new(fragments);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(fragments * tiles));
    #[unroll]
    for fragment in 0..fragments {
        addresses[fragment] = weight_address::<E>(
            &matrices, strides, side, first, lane, column, fragment, plan,
        );
    }
    #[unroll]
    for sum in 0..comptime!(fragments * tiles) {
        sums[sum] = Vector::<f32, Const<4>>::zeroed();
    }
    let mut weights = Array::<Vector<u32, Const<4>>>::new(comptime!(plan.unroll * fragments));
    #[unroll]
    for step in 0..plan.unroll {
        read_weights(&mut weights, &addresses, step, plan);
    }
    wait_prior_launch(plan.reads_ahead);
    mark_owned_volatile_if_present(&epilogue_inputs.factor, plan.pdl);

    let mut rows_address = half_address::<E>(
        input,
        u64::cast_from(lane.row) * u64::cast_from(columns) + u64::cast_from(column),
    );
    let piece_distance = u64::cast_from(columns) * comptime!(2 * PRODUCT_ROWS as u64);
    let mut rows = Array::<Vector<u32, Const<4>>>::new(comptime!(PIECES * tiles));
    read_rows(&mut rows, rows_address, piece_distance, lane, 0usize, plan);
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
        #[unroll]
        for step in 0..plan.unroll {
            let mut next = Array::<Vector<u32, Const<4>>>::new(comptime!(PIECES * tiles));
            if comptime!(step + 1 == plan.unroll) {
                rows_address += comptime!(2 * block as u64);
                read_rows(&mut next, rows_address, piece_distance, lane, 0usize, plan);
            } else {
                let step = comptime!(step + 1);
                read_rows(&mut next, rows_address, piece_distance, lane, step, plan);
            }
            multiply(&mut sums, &rows, &weights, step, half, plan);
            read_weights(&mut weights, &addresses, step, plan);
            #[unroll]
            for piece in 0..comptime!(PIECES * tiles) {
                rows[piece] = next[piece];
            }
        }
        done += 1u32;
    }
    launch_dependents(plan.pdl);
    #[unroll]
    for step in 0..plan.unroll {
        multiply(&mut sums, &rows, &weights, step, half, plan);
        if comptime!(step + 1 < plan.unroll) {
            let step = comptime!(step + 1);
            read_rows(&mut rows, rows_address, piece_distance, lane, step, plan);
        }
    }

    finish_tiles(
        &sums,
        &epilogue_inputs,
        output,
        side,
        first,
        lane,
        plan,
        epilogue,
    );
}

/// Adds up the warps' sums, applies the epilogue, and writes the outputs. The function handles one row tile after the
/// other, because all row tiles use the same shared memory. `first` is the team's first output. Synchronizes the cube.
#[cube]
pub(super) fn finish_tiles<E: Float>(
    sums: &Array<Vector<f32, Const<4>>>,
    epilogue_inputs: &EpilogueInputs<E>,
    output: &mut Tensor<E>,
    side: Side,
    first: u32,
    lane: Lane,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
) {
    let tiles = comptime!(plan.row_tiles());
    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.of_row_tile(0).partials()));
    #[unroll]
    for tile in 0..tiles {
        let tile_plan = comptime!(plan.of_row_tile(tile));
        #[unroll]
        for fragment in 0..plan.fragments() {
            leave_tile_parts(
                &mut partial,
                sums[comptime!(fragment * tiles + tile)],
                lane,
                fragment,
                tile_plan,
            );
        }
        finish_tile(
            &partial,
            epilogue_inputs,
            output,
            side,
            first,
            tile,
            plan,
            epilogue,
        );
    }
}

/// Adds up the warps' sums of a row tile, applies the epilogue, and writes the outputs. Synchronizes the cube, also at
/// the end if another row tile follows, whose sums overwrite those of this one.
#[cube]
pub(super) fn finish_tile<E: Float>(
    partial: &Shared<[f32]>,
    epilogue_inputs: &EpilogueInputs<E>,
    output: &mut Tensor<E>,
    side: Side,
    first: u32,
    #[comptime] tile: usize,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
) {
    let of_outputs = Outputs {
        row: comptime!((tile * TILE_ROWS) as u32).runtime(),
        first,
        outputs: side.outputs,
        column: side.column,
        all_outputs: side.all_outputs,
    };
    finish_parts(
        partial,
        epilogue_inputs,
        output,
        of_outputs,
        comptime!(plan.of_row_tile(tile)),
        epilogue,
    );
    if comptime!(tile + 1 < plan.row_tiles()) {
        sync_cube();
    }
}

/// Writes a warp's partial sums to shared memory, for one fragment of weights and one row tile of the input.
#[cube]
fn leave_tile_parts(
    partial: &mut Shared<[f32]>,
    sum: Vector<f32, Const<4>>,
    lane: Lane,
    #[comptime] fragment: usize,
    #[comptime] tile_plan: ProjectPlan,
) {
    let lower = Lane {
        warp: lane.warp,
        row: lane.row + comptime!(PRODUCT_ROWS as u32),
        column: lane.column,
    };
    leave_parts(
        partial,
        sum.extract(0usize),
        sum.extract(1usize),
        lane,
        fragment,
        tile_plan,
    );
    leave_parts(
        partial,
        sum.extract(2usize),
        sum.extract(3usize),
        lower,
        fragment,
        tile_plan,
    );
}

/// Loads the thread's input for one step, which is 32 columns, in all row tiles. From each input row that the thread
/// handles, the thread loads 16 bytes. If the last row tile extends beyond the input, the missing rows are zeros.
/// `rows_address` is the address of the 16 bytes for step 0 in the thread's first row. `piece_distance` is the size of
/// 8 rows in bytes.
#[cube]
fn read_rows(
    rows: &mut Array<Vector<u32, Const<4>>>,
    rows_address: u64,
    piece_distance: u64,
    lane: Lane,
    #[comptime] step: usize,
    #[comptime] plan: ProjectPlan,
) {
    #[unroll]
    for piece in 0..comptime!(PIECES * plan.row_tiles()) {
        let offset = comptime!(step * STEP_BYTES);
        rows[piece] = read_input_piece(rows_address, piece_distance, lane, piece, offset, plan);
    }
}

/// Loads 16 bytes of the input row `8 · piece + l / 4`, where `l` is the thread's lane. `rows_address` is an address in
/// row `l / 4`. The load begins `8 · piece` rows and `offset` bytes after this address. If the input has no such row,
/// the result is zeros.
#[cube]
pub(super) fn read_input_piece(
    rows_address: u64,
    piece_distance: u64,
    lane: Lane,
    #[comptime] piece: usize,
    #[comptime] offset: usize,
    #[comptime] plan: ProjectPlan,
) -> Vector<u32, Const<4>> {
    let first_row = comptime!(piece * PRODUCT_ROWS);
    let is_there = if comptime!(first_row + PRODUCT_ROWS <= plan.rows) {
        1u32.runtime()
    } else {
        select(
            lane.row + comptime!(first_row as u32) < comptime!(plan.rows as u32),
            1u32,
            0u32,
        )
    };
    let address = rows_address + piece_distance * comptime!(piece as u64);
    read_piece_if(address, is_there, offset)
}

/// Multiplies the weights and inputs of one step (32 columns), for all fragments and row tiles.
#[cube]
fn multiply(
    sums: &mut Array<Vector<f32, Const<4>>>,
    rows: &Array<Vector<u32, Const<4>>>,
    weights: &Array<Vector<u32, Const<4>>>,
    #[comptime] step: usize,
    #[comptime] half: Half,
    #[comptime] plan: ProjectPlan,
) {
    let tiles = comptime!(plan.row_tiles());
    #[unroll]
    for pair in 0..2usize {
        let at = comptime!(2 * pair);
        let next = comptime!(2 * pair + 1);
        #[unroll]
        for tile in 0..tiles {
            let upper = rows[comptime!(PIECES * tile)];
            let lower = rows[comptime!(PIECES * tile + 1)];
            #[unroll]
            for fragment in 0..comptime!(plan.fragments()) {
                let weight = weights[comptime!(step * plan.fragments() + fragment)];
                let place = comptime!(fragment * tiles + tile);
                sums[place] = add_pairs_of_two_rows(
                    sums[place],
                    upper.extract(at),
                    upper.extract(next),
                    lower.extract(at),
                    lower.extract(next),
                    weight.extract(at),
                    weight.extract(next),
                    half,
                );
            }
        }
    }
}
