//! GEMMs of MoE experts with quantized weights on NVIDIA's tensor cores, for a few rows.
//!
//! Algorithm: a pair is a row and one of its chosen experts. A cube computes outputs of one expert. The cube first
//! lists the pairs of its expert. It then multiplies up to 8 of these pairs at once, as [`words`](super::words) does
//! with input rows. The weights of an expert are therefore read once for 8 rows that chose the expert.
//!
//! If there are fewer pairs than experts, cubes are launched for pairs instead of experts. The cubes of an expert's
//! first pair compute the outputs of all its pairs. Other cubes end without reading weights.
//!
//! Tensors: input `[pairs / pairs of a row, columns in]`, words `[experts · rows of an expert, words]`, chosen experts
//! `[rows, top_k]`, output `[pairs, columns out]`.
//!
//! Budget: as in [`words`](super::words), and shared memory for a list of at most [`MOST_PAIRS`] pairs.
//!
//! Bound: memory bandwidth, unless the unpacking of codes takes longer.

use super::super::GEMV_MAX_ROWS;
use super::super::sums::{ProjectPlan, gelu, sum_of_parts};
use super::parts::{lane, weight_row};
use super::staged::{
    InputRows, Staging, copies_scales, fill_ring, first_code, first_scale, leave_sums,
    multiply_stages, ring_of_warp,
};
use super::word_rows::{WordRows, address};
use cube_kit::ampere::cp_async::half_address;
use cube_kit::nvidia::ptx::shared_address;
use cube_kit::pdl::{
    launch_dependents_and_wait, launch_dependents_if, mark_volatile, wait_prior_launch,
};
use cubecl::prelude::*;

/// The largest number of pairs of a launch. Shared memory holds a list of them.
pub(super) const MOST_PAIRS: usize = 1024;

/// The pairs of a launch, and the experts' matrices.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct PairPlace {
    /// The number of pairs.
    pub pairs: u32,
    /// The number of pairs that read the same input row: the number of experts per row, or 1.
    pub pairs_of_row: u32,
    /// The number of cubes per expert, or per pair if there are fewer pairs than experts.
    pub cubes: u32,
    /// The number of rows in an expert's matrix.
    pub rows: u32,
    /// The number of outputs per pair.
    pub outputs: u32,
    /// The distance from a row of the gate projection to the corresponding row of the up projection, in rows.
    pub through: u32,
}

/// Multiplies the input rows by the transposes of their experts' matrices. If `plan.gated`, multiplies the up
/// projection's output by the GELU of the gate projection's output.
///
/// `by_pair` is true if cubes are launched for pairs. `list` is the number of pairs that shared memory holds.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_expert_words_pdl<E: Float, O: Float>(
    input: &Tensor<E>,
    words: &Tensor<u32>,
    word_rows: WordRows,
    chosen: &Tensor<i32>,
    place: PairPlace,
    output: &mut Tensor<O>,
    #[comptime] staging: Staging,
    #[comptime] list: usize,
    #[comptime] by_pair: bool,
    #[comptime] plan: ProjectPlan,
    #[define(E, O)] _elements: [ElemType; 2],
) {
    wait_prior_launch(plan.pdl);
    mark_volatile(input, plan.pdl);
    mark_volatile(chosen, plan.pdl);
    let ordinal = CUBE_POS as u32 / place.cubes;
    let mut expert = ordinal;
    if comptime!(by_pair) {
        expert = u32::cast_from(chosen[ordinal as usize]);
    }
    let mut pairs = Shared::<[u32]>::new_slice(list);
    let mut count = list_pairs(&mut pairs, chosen, place.pairs, expert);
    if comptime!(by_pair) && pairs[0] < ordinal {
        count = 0u32;
    }
    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.partials()));
    let memory = Shared::<[u32]>::new_aligned_slice(comptime!(staging.ring_words(plan)), 128usize);

    let lane = lane();
    let cube = CUBE_POS as u32 % place.cubes;
    let team = cube * comptime!(plan.teams as u32) + UNIT_POS_Y;
    let first = team * comptime!(plan.outputs as u32);
    let columns = word_rows.columns;
    let ring = ring_of_warp(shared_address(&memory), word_rows, lane, staging, plan);
    let fragments = comptime!(plan.fragments());
    let mut code_addresses = Array::<u64>::new(fragments);
    let mut scale_address = 0u64;
    let own_code = first_code(lane);
    let own_scale = first_scale(word_rows.scales, lane, staging);
    #[unroll]
    for fragment in 0..fragments {
        let of_matrix = weight_row(first, lane.row, place.outputs, fragment, plan);
        let mut row = expert * place.rows + of_matrix;
        if comptime!(fragment >= plan.fragments_of_matrix()) {
            row += place.through;
        }
        let start = u64::cast_from(row) * u64::cast_from(word_rows.stride);
        code_addresses[fragment] = address(words, start + u64::cast_from(own_code));
        if copies_scales(lane, fragment) {
            scale_address = address(words, start + u64::cast_from(own_scale));
        }
    }
    let couples = comptime!(fragments / 2);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(couples);
    let mut first_pair = 0u32;
    while first_pair < count {
        let rows = min(count - first_pair, comptime!(GEMV_MAX_ROWS as u32));
        fill_ring(ring, &code_addresses, scale_address, lane, staging, plan);
        #[unroll]
        for sum in 0..couples {
            sums[sum] = Vector::<f32, Const<4>>::zeroed();
        }
        let pair = pairs[(first_pair + min(lane.row, rows - 1u32)) as usize];
        let input_row = pair / place.pairs_of_row;
        let before = u64::cast_from(input_row) * u64::cast_from(columns);
        let input_rows = InputRows {
            address: half_address::<E>(input, before),
            tile_distance: 0u64,
            is_there: select(lane.row < rows, 1u32, 0u32),
        };
        launch_dependents_if(
            first_pair + comptime!(GEMV_MAX_ROWS as u32) >= count,
            plan.pdl,
        );
        multiply_stages(
            &mut sums,
            ring,
            &code_addresses,
            scale_address,
            input_rows,
            lane,
            staging,
            plan,
        );
        #[unroll]
        for couple in 0..couples {
            leave_sums(&mut partial, sums[couple], lane, couple, 0usize, plan);
        }
        sync_cube();
        write_outputs::<O>(
            &partial,
            &pairs,
            first_pair,
            rows,
            first,
            place.outputs,
            output,
            plan,
        );
        // Wait until all units have read the partial sums, before the sums of the next pairs overwrite them.
        sync_cube();
        first_pair += comptime!(GEMV_MAX_ROWS as u32);
    }
}

/// Lists the pairs of an expert in ascending order, and returns their number. Synchronizes the cube.
#[cube]
fn list_pairs(pairs: &mut Shared<[u32]>, chosen: &Tensor<i32>, all: u32, expert: u32) -> u32 {
    let mut count = Shared::<[u32]>::new_slice(1usize);
    if UNIT_POS < 32u32 {
        let mut found = 0u32;
        let mut first = 0u32;
        while first < all {
            let pair = first + UNIT_POS;
            let of_pair = u32::cast_from(chosen[min(pair, all - 1u32) as usize]);
            let is_listed = pair < all && of_pair == expert;
            let one = select(is_listed, 1u32, 0u32);
            let before = plane_exclusive_sum(one);
            if is_listed {
                pairs[(found + before) as usize] = pair;
            }
            found += plane_sum(one);
            first += 32u32;
        }
        if UNIT_POS == 0u32 {
            count[0] = found;
        }
    }
    sync_cube();
    count[0]
}

/// Adds up the partial sums of a team, and writes the outputs of up to 8 pairs.
#[cube]
fn write_outputs<O: Float>(
    partial: &Shared<[f32]>,
    pairs: &Shared<[u32]>,
    first_pair: u32,
    rows: u32,
    first: u32,
    outputs: u32,
    output: &mut Tensor<O>,
    #[comptime] plan: ProjectPlan,
) {
    let of_row = comptime!(plan.outputs as u32);
    let mut item = UNIT_POS_X;
    while item < rows * of_row {
        let row = item / of_row;
        let of_item = item % of_row;
        let column = first + of_item;
        if column < outputs {
            let mut value = sum_of_parts(partial, row, of_item, plan);
            if comptime!(plan.gated) {
                value = gelu(value) * sum_of_parts(partial, row, of_item + of_row, plan);
            }
            let pair = pairs[(first_pair + row) as usize];
            output[(pair * outputs + column) as usize] = O::cast_from(value);
        }
        item += comptime!(plan.team.units as u32);
    }
}

/// Adds up the outputs of each row's experts, weighted by the router's weights. `outputs` is `[pairs, columns]`,
/// `shares` is `[rows, top_k]`, and `output` is `[rows, columns]`. A row has `vectors` vectors, and `cubes` cubes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn mix_pairs_pdl<E: Float, N: Size>(
    outputs: &Tensor<Vector<f32, N>>,
    shares: &Tensor<f32>,
    output: &mut Tensor<Vector<E, N>>,
    vectors: u32,
    cubes: u32,
    #[comptime] top_k: usize,
    #[comptime] units: usize,
    #[comptime] pdl: bool,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    launch_dependents_and_wait(pdl);
    mark_volatile(outputs, pdl);
    mark_volatile(shares, pdl);
    let row = CUBE_POS as u32 / cubes;
    let vector = CUBE_POS as u32 % cubes * comptime!(units as u32) + UNIT_POS;
    if vector < vectors {
        let mut sum = Vector::<f32, N>::zeroed();
        #[unroll]
        for rank in 0..top_k {
            let pair = row * comptime!(top_k as u32) + comptime!(rank as u32);
            let share = Vector::<f32, N>::cast_from(shares[pair as usize]);
            sum += outputs[(pair * vectors + vector) as usize] * share;
        }
        output[(row * vectors + vector) as usize] = Vector::<E, N>::cast_from(sum);
    }
}
