//! GEMM of 9 to 64 input rows with quantized weights on NVIDIA's tensor cores:
//! `output[r, o] = Σ scale · Σ input[r, i] · code[o, i]`, accumulated in f32. Decoding of several sequences uses this
//! kernel.
//!
//! Algorithm: each group of codes is converted to half precision once, and multiplies all input rows. The input rows
//! form row tiles of 16 rows. [`quantized`](super::quantized) uses the same algorithm for at most 8 rows.
//!
//! Budget: shared memory holds the warps' sums of one row tile, at most 16 KB. A step is the 64 columns that a warp
//! multiplies at once. With 64 rows, the registers of a thread hold 32 sums, at most 32 words of codes, and 16 words of
//! input for one row tile and one step.
//!
//! Bound: memory bandwidth, unless the conversion of codes or the reads of the input take longer.

use super::super::concat::{WeightMatrices, side_of_cube};
use super::super::sums::{Epilogue, EpilogueInputs, ProjectPlan};
use super::batch::{finish_tiles, read_input_piece};
use super::codes::{Codes, GROUP, STEP, as_codes_lie, numbers};
use super::parts::{Lane, lane, weight_row};
use super::quantized::{
    BLOCK, INPUT_BYTES, WordRows, address_of_side, exchange_codes, go_to_tail, read_codes,
};
use cube_kit::ampere::cp_async::half_address;
use cube_kit::ampere::gemv::{PRODUCT_ROWS, add_pairs_of_two_rows, read_word};
use cube_kit::nvidia::Half;
use cube_kit::nvidia::ptx::unpack;
use cube_kit::pdl::{launch_dependents, mark_owned_volatile_if_present, wait_prior_launch};
use cubecl::prelude::*;

/// Computes the same as
/// [`project_words_by_matrix_units_pdl`](super::quantized::project_words_by_matrix_units_pdl), for more than 8 rows.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_batch_of_words_by_matrix_units_pdl<E: Float, N: Size>(
    input: &Tensor<E>,
    matrices: WeightMatrices<OwnedTensor<u32>>,
    word_rows: WordRows,
    epilogue_inputs: EpilogueInputs<E>,
    output: &mut Tensor<E>,
    #[comptime] codes: Codes,
    #[comptime] tail: usize,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
    #[define(N)] _words_of_lane: usize,
) {
    wait_prior_launch(comptime!(plan.pdl && !plan.reads_ahead));
    let side = side_of_cube(CUBE_POS as u32, matrices.rows, plan.sides);
    let team = side.cube * comptime!(plan.teams as u32) + UNIT_POS_Y;
    let first = team * comptime!(plan.outputs as u32);
    let lane = lane();

    let fragments = comptime!(plan.fragments());
    let mut code_addresses = Array::<u64>::new(fragments);
    let mut scale_addresses = Array::<u64>::new(fragments);
    let tiles = comptime!(plan.row_tiles());
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(fragments * tiles));
    let first_code =
        (lane.warp * comptime!(4 * BLOCK as u32) + lane.column) * comptime!(codes.words() as u32);
    let first_scale = word_rows.scales + lane.warp * comptime!(BLOCK as u32) + lane.column;
    #[unroll]
    for fragment in 0..fragments {
        let row = weight_row(first, lane.row, side.outputs, fragment, plan);
        let start = u64::cast_from(row) * u64::cast_from(word_rows.stride);
        let code = start + u64::cast_from(first_code);
        let scale = start + u64::cast_from(first_scale);
        code_addresses[fragment] = address_of_side(&matrices, code, side, fragment, plan);
        scale_addresses[fragment] = address_of_side(&matrices, scale, side, fragment, plan);
    }
    #[unroll]
    for sum in 0..comptime!(fragments * tiles) {
        sums[sum] = Vector::<f32, Const<4>>::zeroed();
    }
    let mut read = Array::<Vector<u32, N>>::new(comptime!(BLOCK * fragments));
    let mut scales = Array::<u32>::new(fragments);
    let mut next_scales = Array::<u32>::new(fragments);
    #[unroll]
    for fragment in 0..fragments {
        scales[fragment] = read_word(scale_addresses[fragment], 0usize);
    }
    #[unroll]
    for step in 0..BLOCK {
        read_codes::<N>(&mut read, &code_addresses, step, codes, plan);
    }
    let whole_blocks = word_rows.columns / comptime!((BLOCK * STEP) as u32);
    wait_prior_launch(plan.reads_ahead);
    mark_owned_volatile_if_present(&epilogue_inputs.factor, plan.pdl);

    // The index of the quarter that this thread multiplies in every quantization group. Before the multiplication, the
    // four threads of a weight row exchange codes, so that each thread has one quarter of each group.
    let quarter = lane.column % 2u32 * 2u32 + lane.column / 2u32;
    let column =
        lane.warp * comptime!((BLOCK * STEP) as u32) + quarter * comptime!(GROUP as u32 / 4);
    let mut rows_address = half_address::<E>(
        input,
        u64::cast_from(lane.row) * u64::cast_from(word_rows.columns) + u64::cast_from(column),
    );
    let piece_distance = u64::cast_from(word_rows.columns) * comptime!(2 * PRODUCT_ROWS as u64);
    let parts = comptime!(plan.team.parts());
    let blocks = whole_blocks / comptime!(parts as u32);
    let mut done = 1u32;
    while done < blocks {
        #[unroll]
        for fragment in 0..fragments {
            let code_bytes = comptime!((BLOCK * codes.step_bytes() * parts) as u64);
            code_addresses[fragment] += code_bytes;
            let scale_bytes = comptime!((4 * BLOCK * parts) as u64);
            scale_addresses[fragment] += scale_bytes;
            next_scales[fragment] = read_word(scale_addresses[fragment], 0usize);
        }
        #[unroll]
        for step in 0..BLOCK {
            multiply::<N>(
                &mut sums,
                &read,
                &scales,
                rows_address,
                piece_distance,
                lane,
                step,
                codes,
                plan,
            );
            read_codes::<N>(&mut read, &code_addresses, step, codes, plan);
        }
        #[unroll]
        for fragment in 0..fragments {
            scales[fragment] = next_scales[fragment];
        }
        rows_address += comptime!((BLOCK * INPUT_BYTES * parts) as u64);
        done += 1u32;
    }
    launch_dependents(plan.pdl);
    let has_tail = lane.warp == 0u32;
    if comptime!(tail > 0) && has_tail {
        go_to_tail(
            &mut code_addresses,
            &scale_addresses,
            &mut next_scales,
            lane,
            codes,
            tail,
            plan,
        );
    }
    #[unroll]
    for step in 0..BLOCK {
        multiply::<N>(
            &mut sums,
            &read,
            &scales,
            rows_address,
            piece_distance,
            lane,
            step,
            codes,
            plan,
        );
        if comptime!(step < tail) && has_tail {
            read_codes::<N>(&mut read, &code_addresses, step, codes, plan);
        }
    }
    if comptime!(tail > 0) && has_tail {
        rows_address += comptime!((BLOCK * INPUT_BYTES * parts) as u64);
        #[unroll]
        for step in 0..tail {
            multiply::<N>(
                &mut sums,
                &read,
                &next_scales,
                rows_address,
                piece_distance,
                lane,
                step,
                codes,
                plan,
            );
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

/// Multiplies the codes in a step of 64 columns by the inputs of all rows, and adds the scaled results to the sums.
#[cube]
fn multiply<N: Size>(
    sums: &mut Array<Vector<f32, Const<4>>>,
    read: &Array<Vector<u32, N>>,
    scales: &Array<u32>,
    rows_address: u64,
    piece_distance: u64,
    lane: Lane,
    #[comptime] step: usize,
    #[comptime] codes: Codes,
    #[comptime] plan: ProjectPlan,
) {
    let tiles = comptime!(plan.row_tiles());
    let fragments = comptime!(plan.fragments());
    let half_words = comptime!(codes.words() / 2);
    // The converted codes of both quantization groups in the step. There are four words for each group and each
    // fragment of 8 weight rows. Each word holds two 16-bit floats.
    let mut weights = Array::<u32>::new(comptime!(8 * fragments));
    // The scales of both quantization groups in the step. Each fragment of 8 weight rows has two scales per group, one
    // for each of the thread's two outputs.
    let mut factors = Array::<f32>::new(comptime!(4 * fragments));
    #[unroll]
    for fragment in 0..fragments {
        let own = read[comptime!(step * fragments + fragment)];
        let mut of_group = Array::<u32>::new(half_words);
        let mut of_next = Array::<u32>::new(half_words);
        exchange_codes::<N>(&mut of_group, &mut of_next, own, lane, codes);
        #[unroll]
        for pair in 0..4usize {
            weights[comptime!(8 * fragment + pair)] = numbers(&of_group, pair, codes);
            weights[comptime!(8 * fragment + 4 + pair)] = numbers(&of_next, pair, codes);
        }
        #[unroll]
        for output in 0..2usize {
            let from = lane.column * 8u32 + comptime!((4 * output + step) as u32);
            let both = unpack(plane_shuffle(scales[fragment], from), Half::F16);
            factors[comptime!(4 * fragment + output)] = both.extract(0usize);
            factors[comptime!(4 * fragment + 2 + output)] = both.extract(1usize);
        }
    }
    #[unroll]
    for tile in 0..tiles {
        #[unroll]
        for group in 0..2usize {
            let offset = comptime!(step * INPUT_BYTES + group * INPUT_BYTES / 2);
            let upper = read_input_piece(
                rows_address,
                piece_distance,
                lane,
                comptime!(2 * tile),
                offset,
                plan,
            );
            let lower = read_input_piece(
                rows_address,
                piece_distance,
                lane,
                comptime!(2 * tile + 1),
                offset,
                plan,
            );
            let mut uppers = Array::<u32>::new(4usize);
            let mut lowers = Array::<u32>::new(4usize);
            as_codes_lie(&mut uppers, upper, codes);
            as_codes_lie(&mut lowers, lower, codes);
            #[unroll]
            for fragment in 0..fragments {
                let mut group_sums = Vector::<f32, Const<4>>::zeroed();
                #[unroll]
                for product in 0..2usize {
                    let first = comptime!(2 * product);
                    let next = comptime!(2 * product + 1);
                    let weight = comptime!(8 * fragment + 4 * group + 2 * product);
                    group_sums = add_pairs_of_two_rows(
                        group_sums,
                        uppers[first],
                        uppers[next],
                        lowers[first],
                        lowers[next],
                        weights[weight],
                        weights[comptime!(weight + 1)],
                        codes.half,
                    );
                }
                let place = comptime!(fragment * tiles + tile);
                let mut sum = sums[place];
                #[unroll]
                for element in 0..4usize {
                    let factor = factors[comptime!(4 * fragment + 2 * group + element % 2)];
                    sum.insert(
                        element,
                        sum.extract(element) + group_sums.extract(element) * factor,
                    );
                }
                sums[place] = sum;
            }
        }
    }
}
