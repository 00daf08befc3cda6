//! GEMV with quantized weights on NVIDIA's tensor cores: `output[r, o] = Σ scale · Σ input[r, i] · code[o, i]`,
//! accumulated in f32.
//!
//! Algorithm: a step is 64 columns, which are two quantization groups. Four threads share each weight row. Each of
//! these threads reads 16 adjacent codes, which are half of a group. The threads then exchange codes, so that each
//! thread has a quarter of each group. Two tensor-core instructions sum over one group, and the sum is multiplied by
//! the group's scale in f32. Four steps form a block. Each of the four threads reads the scales of one step of the
//! block, and sends them to the other threads by shuffles. The tail is the steps after the last whole block. Only the
//! first warp of a team multiplies the tail, which follows the last whole block of that warp.
//!
//! Budget: shared memory holds the warps' sums, as in the float kernel. Registers hold the codes of 4 steps (at most 32
//! words), the 8 input words of a step, and the dequantized codes of a group. For each fragment of 8 weight rows,
//! registers also hold 2 sums and two words of scales.
//!
//! Bound: memory bandwidth, unless the unpacking of codes takes longer.

use super::super::concat::{Side, WeightMatrices, side_of_cube};
use super::super::sums::{Epilogue, EpilogueInputs, Outputs, ProjectPlan, finish_parts};
use super::codes::{Codes, GROUP, STEP, as_codes_lie, numbers};
use super::parts::{Lane, lane, leave_parts, weight_row};
use cube_kit::ampere::cp_async::half_address;
use cube_kit::ampere::gemv::{add_pairs, read_piece_if, read_word, stream};
use cube_kit::nvidia::Half;
use cube_kit::nvidia::ptx::{unpack, word_address};
use cube_kit::pdl::{launch_dependents, mark_owned_volatile_if_present, wait_prior_launch};
use cubecl::prelude::*;

/// The number of steps in a block. A step is 64 columns. Each of the four threads that share a weight row reads the
/// scales of one step of the block.
pub(super) const BLOCK: usize = 4;
/// The number of bytes of an input row that a step of 64 columns covers.
pub(super) const INPUT_BYTES: usize = 2 * STEP;

/// The layout of the packed rows of a quantized matrix.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WordRows {
    /// The distance between rows, in words.
    pub stride: u32,
    /// The offset of the scales within a row, in words.
    pub scales: u32,
    /// The number of columns in a row.
    pub columns: u32,
}

/// Multiplies `input` by the transposes of the quantized matrices. If `plan.gated`, multiplies the second matrix's
/// output by the GELU of the first matrix's output. Otherwise concatenates the outputs. `tail` is the number of steps
/// after the last whole block.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_words_by_matrix_units_pdl<E: Float, N: Size>(
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
    let mut sums = Array::<f32>::new(comptime!(2 * fragments));
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
        sums[comptime!(2 * fragment)] = 0.0f32;
        sums[comptime!(2 * fragment + 1)] = 0.0f32;
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

    let is_there = select(lane.row < comptime!(plan.rows as u32), 1u32, 0u32);
    let input_row = min(lane.row, comptime!(plan.rows as u32 - 1));
    // The index of the quarter that this thread multiplies in every quantization group. Before the multiplication, the
    // four threads of a weight row exchange codes, so that each thread has one quarter of each group.
    let quarter = lane.column % 2u32 * 2u32 + lane.column / 2u32;
    let column =
        lane.warp * comptime!((BLOCK * STEP) as u32) + quarter * comptime!(GROUP as u32 / 4);
    let mut rows_address = half_address::<E>(
        input,
        u64::cast_from(input_row) * u64::cast_from(word_rows.columns) + u64::cast_from(column),
    );
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
                is_there,
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
            is_there,
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
                is_there,
                lane,
                step,
                codes,
                plan,
            );
        }
    }

    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.partials()));
    #[unroll]
    for fragment in 0..fragments {
        let sum = sums[comptime!(2 * fragment)];
        let next = sums[comptime!(2 * fragment + 1)];
        leave_parts(&mut partial, sum, next, lane, fragment, plan);
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

/// Returns the address of word `index` in the matrix that a fragment belongs to.
#[cube]
pub(super) fn address_of_side(
    matrices: &WeightMatrices<OwnedTensor<u32>>,
    index: u64,
    side: Side,
    #[comptime] fragment: usize,
    #[comptime] plan: ProjectPlan,
) -> u64 {
    if comptime!(fragment >= plan.fragments_of_matrix()) {
        address_if_there(&matrices.second, index)
    } else {
        let mut found = address(&matrices.first, index);
        if comptime!(plan.sides > 1) {
            if side.number == 1u32 {
                found = address_if_there(&matrices.second, index);
            } else if side.number == 2u32 {
                found = address_if_there(&matrices.third, index);
            }
        }
        found
    }
}

#[cube]
pub(super) fn address(words: &Tensor<u32>, index: u64) -> u64 {
    // SAFETY: the pointer only gives the address of `words`, and is not dereferenced here.
    word_address::<u32>(unsafe { words.as_slice().as_ptr_unchecked() }, index)
}

#[cube]
fn address_if_there(words: &ComptimeOption<OwnedTensor<u32>>, index: u64) -> u64 {
    let mut found = 0u64;
    #[comptime]
    match words {
        ComptimeOption::Some(words) => {
            found = address(words, index);
        }
        ComptimeOption::None => {}
    }
    found
}

/// Moves the addresses from the last whole block of a team's first warp to the tail, and reads the tail's scales.
#[cube]
pub(super) fn go_to_tail(
    code_addresses: &mut Array<u64>,
    scale_addresses: &Array<u64>,
    scales: &mut Array<u32>,
    lane: Lane,
    #[comptime] codes: Codes,
    #[comptime] tail: usize,
    #[comptime] plan: ProjectPlan,
) {
    let parts = comptime!(plan.team.parts());
    // A thread without a step of its own reads the scales of the last step. No other thread asks for these.
    let before = lane.column - min(lane.column, comptime!(tail.max(1) as u32 - 1));
    let bytes = comptime!((4 * BLOCK * parts) as u32) - 4u32 * before;
    #[unroll]
    for fragment in 0..comptime!(plan.fragments()) {
        code_addresses[fragment] += comptime!((BLOCK * codes.step_bytes() * parts) as u64);
        let address = scale_addresses[fragment] + u64::cast_from(bytes);
        scales[fragment] = read_word(address, 0usize);
    }
}

/// Issues the loads of the codes in a step of 64 columns.
#[cube]
pub(super) fn read_codes<N: Size>(
    read: &mut Array<Vector<u32, N>>,
    addresses: &Array<u64>,
    #[comptime] step: usize,
    #[comptime] codes: Codes,
    #[comptime] plan: ProjectPlan,
) {
    #[unroll]
    for fragment in 0..comptime!(plan.fragments()) {
        let offset = comptime!(step * codes.step_bytes());
        let place = comptime!(step * plan.fragments() + fragment);
        read[place] = stream::<N>(addresses[fragment], offset, comptime!(codes.words()));
    }
}

/// Exchanges codes among the four threads that share a weight row. `own` holds the 16 adjacent codes that the thread
/// has read in a step. A step has two groups. After the exchange, the thread has a quarter of the first group in
/// `of_group`, and a quarter of the second group in `of_next`.
#[cube]
pub(super) fn exchange_codes<N: Size>(
    of_group: &mut Array<u32>,
    of_next: &mut Array<u32>,
    own: Vector<u32, N>,
    lane: Lane,
    #[comptime] codes: Codes,
) {
    let half_words = comptime!(codes.words() / 2);
    let gives_first = lane.column >= 2u32;
    #[unroll]
    for word in 0..half_words {
        let one = own.extract(word);
        let other = own.extract(comptime!(half_words + word));
        let received = plane_shuffle_xor(select(gives_first, one, other), 2u32);
        of_group[word] = select(gives_first, received, one);
        of_next[word] = select(gives_first, other, received);
    }
}

/// Multiplies the codes in a step of 64 columns by the inputs, and adds the scaled results to the sums.
#[cube]
pub(super) fn multiply<N: Size>(
    sums: &mut Array<f32>,
    read: &Array<Vector<u32, N>>,
    scales: &Array<u32>,
    rows_address: u64,
    is_there: u32,
    lane: Lane,
    #[comptime] step: usize,
    #[comptime] codes: Codes,
    #[comptime] plan: ProjectPlan,
) {
    let offset = comptime!(step * INPUT_BYTES);
    let row = read_piece_if(rows_address, is_there, offset);
    let next_row = read_piece_if(rows_address, is_there, comptime!(offset + INPUT_BYTES / 2));
    let mut pairs = Array::<u32>::new(4usize);
    let mut next_pairs = Array::<u32>::new(4usize);
    as_codes_lie(&mut pairs, row, codes);
    as_codes_lie(&mut next_pairs, next_row, codes);
    let half_words = comptime!(codes.words() / 2);
    #[unroll]
    for fragment in 0..comptime!(plan.fragments()) {
        let own = read[comptime!(step * plan.fragments() + fragment)];
        let mut of_group = Array::<u32>::new(half_words);
        let mut of_next = Array::<u32>::new(half_words);
        exchange_codes::<N>(&mut of_group, &mut of_next, own, lane, codes);
        let group = group_sums(&of_group, &pairs, codes);
        let next = group_sums(&of_next, &next_pairs, codes);
        #[unroll]
        for output in 0..2usize {
            let from = lane.column * 8u32 + comptime!((4 * output + step) as u32);
            let both = unpack(plane_shuffle(scales[fragment], from), Half::F16);
            let place = comptime!(2 * fragment + output);
            let sum = sums[place] + group.extract(output) * both.extract(0usize);
            sums[place] = sum + next.extract(output) * both.extract(1usize);
        }
    }
}

/// Returns four sums of input times code over one quantization group, before the multiplication by the group's scale.
/// `words` and `pairs` hold the thread's quarter of the group's columns. The last two sums are for rows 8 to 15 of the
/// instruction's left operand. These rows are zeros, so the two sums are 0.
#[cube]
fn group_sums(
    words: &Array<u32>,
    pairs: &Array<u32>,
    #[comptime] codes: Codes,
) -> Vector<f32, Const<4>> {
    let mut sums = Vector::<f32, Const<4>>::zeroed();
    #[unroll]
    for product in 0..2usize {
        let first = comptime!(2 * product);
        let next = comptime!(2 * product + 1);
        sums = add_pairs(
            sums,
            pairs[first],
            pairs[next],
            numbers(words, first, codes),
            numbers(words, next, codes),
            codes.half,
        );
    }
    sums
}
