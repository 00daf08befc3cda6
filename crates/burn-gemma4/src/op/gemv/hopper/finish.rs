//! The end of a batch GEMM: adds up the partial sums of the cluster's cubes, and writes the outputs.
//!
//! The cubes of a cluster divide the inner dimension. For every input row, each of these cubes has partial sums over
//! its share of the inner dimension. The input rows are divided into slices. For each slice, one cube of the cluster
//! adds up the partial sums of all cubes.
//!
//! The partial sums of one cube are called a part. In shared memory, a cube holds the parts of its slice, one from each
//! cube of the cluster: `[part, input row of the slice, weight row of the tile]`.

use super::super::concat::Side;
use super::super::sums::{Epilogue, EpilogueInputs, apply_epilogue};
use super::plan::{BatchPlan, WIDTH};
use cube_kit::hopper::cluster::{remote_address, store_remote, store_remote_async};
use cube_kit::hopper::{PRODUCT_ROWS, WARPGROUP};
use cube_kit::nvidia::accumulator::{column, is_second};
use cube_kit::nvidia::ptx::{load_shared_four, store_shared};
use cubecl::prelude::*;

/// Returns the number of bytes of partial sums that this cube receives from all cubes of the cluster.
#[cube]
pub(super) fn received_bytes(rank: u32, rows: u32, #[comptime] plan: BatchPlan) -> u32 {
    let slice = comptime!(plan.slice() as u32);
    let first = min(rank * slice, rows);
    min(rows - first, slice) * comptime!((4 * plan.parts * PRODUCT_ROWS * plan.row_tiles) as u32)
}

/// Writes the warpgroup's partial sums to the shared memory of the cubes that add up these partial sums. `partials` is
/// the address of the partial sums in shared memory, and `rank` is the index of this cube within the cluster. If the plan
/// has signals, each cube receives the sums of its input rows at `barrier`.
#[cube]
pub(super) fn leave_partials<N: Size>(
    sums: Vector<f32, N>,
    partials: u32,
    barrier: u32,
    rank: u32,
    rows: u32,
    #[comptime] plan: BatchPlan,
) {
    let lane = UNIT_POS % 32u32;
    let weight_row = UNIT_POS / 32u32 * 16u32 + lane / 4u32;
    let slice = comptime!(plan.slice() as u32);
    let stride = comptime!(plan.partials_stride() as u32);
    let of_tile = comptime!(plan.tokens / 2);
    #[unroll]
    for register in 0..of_tile {
        // In every row tile, this register holds the sum for the input row `token` and the weight row `row`.
        let token = lane % 4u32 * 2u32 + comptime!(column(register) as u32);
        let row = weight_row + comptime!(if is_second(register) { 8u32 } else { 0 });
        let at = partials + ((rank * slice + token % slice) * stride + row) * 4u32;
        if comptime!(plan.has_signals()) {
            // The sums of input rows that do not exist are not sent.
            if token < rows {
                let receiver = token / slice;
                let remote = remote_address(at, receiver);
                let remote_barrier = remote_address(barrier, receiver);
                #[unroll]
                for tile in 0..plan.row_tiles {
                    store_remote_async(
                        remote + comptime!((4 * tile * PRODUCT_ROWS) as u32),
                        sums.extract(comptime!(tile * of_tile + register)),
                        remote_barrier,
                    );
                }
            }
        } else if comptime!(plan.parts > 1) {
            let remote = remote_address(at, token / slice);
            #[unroll]
            for tile in 0..plan.row_tiles {
                store_remote(
                    remote + comptime!((4 * tile * PRODUCT_ROWS) as u32),
                    sums.extract(comptime!(tile * of_tile + register)),
                );
            }
        } else {
            #[unroll]
            for tile in 0..plan.row_tiles {
                let sum = sums.extract(comptime!(tile * of_tile + register));
                store_shared(
                    at + comptime!((4 * tile * PRODUCT_ROWS) as u32),
                    u32::reinterpret(sum),
                );
            }
        }
    }
}

/// For the input rows of this cube's slice, adds up the partial sums of all cubes, applies the epilogue, and writes the
/// outputs. `first` is the index of the tile's first output among the outputs of the matrix.
#[cube]
pub(super) fn finish_outputs<E: Float>(
    partials: u32,
    epilogue_inputs: &EpilogueInputs<E>,
    output: &mut Tensor<Vector<E, Const<4>>>,
    side: Side,
    first: u32,
    rank: u32,
    rows: u32,
    #[comptime] plan: BatchPlan,
    #[comptime] epilogue: Epilogue,
) {
    let of_row = comptime!((plan.outputs() / WIDTH) as u32);
    let slice = comptime!(plan.slice() as u32);
    let width = comptime!(WIDTH as u32);
    let mut item = UNIT_POS;
    while item < slice * of_row {
        let of_slice = item / of_row;
        let of_tile = item % of_row * width;
        let row = rank * slice + of_slice;
        let column = first + of_tile;
        if row < rows && column < side.outputs {
            let at =
                partials + (of_slice * comptime!(plan.partials_stride() as u32) + of_tile) * 4u32;
            let sums = sum_of_parts(at, plan);
            let mut through = Vector::<f32, Const<4>>::zeroed();
            if comptime!(plan.gated) {
                through = sum_of_parts(at + comptime!((4 * PRODUCT_ROWS) as u32), plan);
            }
            let mut values = Vector::<f32, Const<4>>::zeroed();
            #[unroll]
            for i in 0..WIDTH {
                values.insert(
                    i,
                    apply_epilogue::<E>(
                        sums.extract(i),
                        through.extract(i),
                        epilogue_inputs,
                        row as usize,
                        (column + comptime!(i as u32)) as usize,
                        plan.gated,
                        epilogue,
                    ),
                );
            }
            let to = row as usize * side.all_outputs as usize + (side.column + column) as usize;
            output[to / WIDTH] = Vector::cast_from(values);
        }
        item += comptime!(WARPGROUP as u32);
    }
}

/// Returns four neighboring sums, each added up over all parts. A part is the partial sums of one cube. `at` is the
/// address of the four partial sums in the first part.
#[cube]
fn sum_of_parts(at: u32, #[comptime] plan: BatchPlan) -> Vector<f32, Const<4>> {
    let part_bytes = comptime!(4 * plan.slice() * plan.partials_stride());
    let mut sum = load_shared_four(at);
    #[unroll]
    for part in 1..plan.parts {
        sum += load_shared_four(at + comptime!((part * part_bytes) as u32));
    }
    sum
}
