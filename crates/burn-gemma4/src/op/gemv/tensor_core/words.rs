//! GEMM of up to 64 input rows with quantized weights on NVIDIA's tensor cores:
//! `output[r, o] = Σ scale · Σ input[r, i] · code[o, i]`, accumulated in f32. Decoding uses this
//! kernel.
//!
//! Algorithm: a team of warps computes the outputs of 16 or 32 weight rows for all input rows. The warps of a team
//! divide the inner dimension among themselves, in stages: see [`staged`](super::staged). Their partial sums are added
//! up in a fixed order, so every run gives the same bits.
//!
//! Budget: a stage has at most 576 bytes for each fragment of 8 weight rows. With 16 warps and 8 fragments in flight
//! per warp, the rings take 72 KB. The warps' sums of 16 input rows take at most 16 KB more. Registers hold 4 sums for
//! each 16 weight rows and 8 input rows, 8 words of input for each 8 input rows, and the codes and scales of one stage.
//!
//! Schedule: the copies of weights begin before the wait for the previous launch.
//!
//! Bound: memory bandwidth, if the conversion of codes is faster. For 4,096 codes of 4 bits and 8 input rows, a warp
//! issues 320 to 350 instructions. Shifts and masks of codes are 112 of these instructions.

use super::super::concat::{Side, WeightMatrices, side_of_cube};
use super::super::sums::{Epilogue, EpilogueInputs, ProjectPlan};
use super::batch::{TILE_ROWS, finish_tile};
use super::parts::{Lane, lane, weight_row};
use super::staged::{
    InputRows, Staging, TILE, copies_scales, fill_ring, first_code, first_scale, leave_sums,
    multiply_stages, ring_of_warp,
};
use super::word_rows::{WordRows, address_of_side};
use cube_kit::ampere::cp_async::half_address;
use cube_kit::nvidia::ptx::shared_address;
use cube_kit::pdl::{launch_dependents, mark_owned_volatile_if_present, wait_prior_launch};
use cubecl::prelude::*;

/// Multiplies `input` by the transposes of the quantized matrices. If `plan.gated`, multiplies the second matrix's
/// output by the GELU of the first matrix's output. Otherwise concatenates the outputs. `plan.unroll` is the number of
/// stages in a warp's ring.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_words_by_matrix_units_pdl<E: Float>(
    input: &Tensor<E>,
    matrices: WeightMatrices<OwnedTensor<u32>>,
    word_rows: WordRows,
    epilogue_inputs: EpilogueInputs<E>,
    output: &mut Tensor<E>,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
) {
    wait_prior_launch(comptime!(plan.pdl && !plan.reads_ahead));
    let side = side_of_cube(CUBE_POS as u32, matrices.rows, plan.sides);
    let team = side.cube * comptime!(plan.teams as u32) + UNIT_POS_Y;
    let first = team * comptime!(plan.outputs as u32);
    let lane = lane();
    let memory = Shared::<[u32]>::new_aligned_slice(comptime!(staging.ring_words(plan)), 128usize);
    let columns = word_rows.columns;
    let ring = ring_of_warp(shared_address(&memory), word_rows, lane, staging, plan);
    let fragments = comptime!(plan.fragments());
    let mut code_addresses = Array::<u64>::new(fragments);
    let mut scale_address = 0u64;
    let own_code = first_code(lane);
    let own_scale = first_scale(word_rows.scales, lane, staging);
    #[unroll]
    for fragment in 0..fragments {
        let row = weight_row(first, lane.row, side.outputs, fragment, plan);
        let start = u64::cast_from(row) * u64::cast_from(word_rows.stride);
        let code = start + u64::cast_from(own_code);
        code_addresses[fragment] = address_of_side(&matrices, code, side, fragment, plan);
        if copies_scales(lane, fragment) {
            let scale = start + u64::cast_from(own_scale);
            scale_address = address_of_side(&matrices, scale, side, fragment, plan);
        }
    }
    fill_ring(ring, &code_addresses, scale_address, lane, staging, plan);
    wait_prior_launch(plan.reads_ahead);
    mark_owned_volatile_if_present(&epilogue_inputs.factor, plan.pdl);
    launch_dependents(plan.pdl);

    let before = u64::cast_from(lane.row) * u64::cast_from(columns);
    let rows = InputRows {
        address: half_address::<E>(input, before),
        tile_distance: u64::cast_from(columns) * comptime!(2 * TILE as u64),
        is_there: 1u32,
    };
    let couples = comptime!(fragments / 2 * plan.input_tiles());
    let mut sums = Array::<Vector<f32, Const<4>>>::new(couples);
    #[unroll]
    for sum in 0..couples {
        sums[sum] = Vector::<f32, Const<4>>::zeroed();
    }
    multiply_stages(
        &mut sums,
        ring,
        &code_addresses,
        scale_address,
        rows,
        lane,
        staging,
        plan,
    );

    finish_sums(
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
fn finish_sums<E: Float>(
    sums: &Array<Vector<f32, Const<4>>>,
    epilogue_inputs: &EpilogueInputs<E>,
    output: &mut Tensor<E>,
    side: Side,
    first: u32,
    lane: Lane,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
) {
    let all_tiles = comptime!(plan.input_tiles());
    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.of_row_tile(0).partials()));
    #[unroll]
    for row_tile in 0..comptime!(plan.row_tiles()) {
        let tile_plan = comptime!(plan.of_row_tile(row_tile));
        #[unroll]
        for tile in 0..comptime!(tile_plan.input_tiles()) {
            #[unroll]
            for couple in 0..comptime!(plan.fragments() / 2) {
                let all = comptime!(couple * all_tiles + row_tile * (TILE_ROWS / TILE) + tile);
                leave_sums(&mut partial, sums[all], lane, couple, tile, tile_plan);
            }
        }
        finish_tile(
            &partial,
            epilogue_inputs,
            output,
            side,
            first,
            row_tile,
            plan,
            epilogue,
        );
    }
}
