//! A layer's per-layer embedding block, in one launch instead of four. For each row of the residual stream:
//!
//! ```text
//! x = stream + norm(added)
//! gated = gelu(x · gateᵀ) · embedding
//! sum = (x + norm(gated · projectionᵀ)) · scalar
//! normed = norm(sum)
//! ```
//!
//! Algorithm: a cluster of 8 cubes computes one row, or up to 8 rows if there are more than 8 in all. Every cube computes
//! all columns of `x`, and an eighth of the columns of `gated`, `sum` and `normed`. The cubes exchange `gated` and the
//! sums of squares of both norms through distributed shared memory. Sums are added up in a fixed order, so every run
//! gives the same bits. The GEMMs are those of [`staged`](super::super::staged).
//!
//! Tensors: stream, added, sum and normed `[rows, columns]`; gate `[embedding, words]`; projection `[columns, words]`;
//! embedding `[rows, layers · embedding]`.
//!
//! Budget: shared memory holds the cube's weights of both GEMMs, 28 KB each for E2B in Q4_0, and 8 rows of `x`, of
//! `gated` and of the cube's sums, 37 KB together. With one row, a thread has a vector of the stream.
//!
//! Schedule: the copies of all weights begin before the wait for the previous launch. After the wait, memory is read
//! once. The cubes wait for each other three times, and the threads of a cube four times.
//!
//! Bound: latency. The launches that the block replaces took 8 to 9 µs of E2B's layers, most of it between launches.

use super::super::super::sums::{FactorPlace, gelu, sum_of_parts};
use super::super::parts::{Lane, lane};
use super::super::plan::WARP;
use super::super::staged::{
    InputRows, Staging, TILE, copies_scales, fill_ring, first_code, first_scale, leave_sums,
    multiply_stages, ring_of_warp,
};
use super::super::word_rows::{WordRows, address};
use super::plan::{BARRIERS, BlockPlan, CUBES, GATES, RowGroups};
use crate::op::gemv::sums::ProjectPlan;
use crate::op::sums::sum_of_squares;
use cube_kit::ampere::cp_async::PIECE_BYTES;
use cube_kit::ampere::gemv::PRODUCT_ROWS;
use cube_kit::hopper::cluster::{
    cluster_arrive_relaxed, cluster_wait, remote_address, store_remote_async,
};
use cube_kit::hopper::ptx::{barrier_expect, barrier_init_fence, barrier_wait};
use cube_kit::nvidia::mbarrier::barrier_init;
use cube_kit::nvidia::ptx::{
    load_shared, load_shared_four, load_shared_pair, pack, shared_address, store_shared,
    store_shared_four, unpack,
};
use cube_kit::pdl::{
    launch_dependents, load_element_now, load_now, mark_volatile, wait_prior_launch,
};
use cubecl::prelude::*;

/// The activations and the parameters other than the weights of the GEMMs. A vector is 16 bytes.
#[derive(CubeType, CubeLaunch)]
pub(super) struct BlockInputs<E: Float, N: Size> {
    pub stream: OwnedTensor<Vector<E, N>>,
    pub added: OwnedTensor<Vector<E, N>>,
    /// The weight of the norm of `added`.
    pub norm_weight: OwnedTensor<Vector<E, N>>,
    /// The per-layer embeddings of all layers.
    pub embedding: OwnedTensor<E>,
    pub embedding_place: FactorPlace,
    /// The weight of the norm of the projection's output.
    pub last_weight: OwnedTensor<E>,
    /// The scalar factor of the sum, `[1]`.
    pub scalar: OwnedTensor<E>,
    /// The weight of the sum's norm.
    pub next_weight: OwnedTensor<E>,
    /// The number of rows of the residual stream.
    pub rows: u32,
    /// The epsilon of all norms.
    pub epsilon: f32,
}

/// Addresses in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Places {
    /// The rows of the residual stream.
    rows: u32,
    /// The gate's outputs.
    gated: u32,
    /// The projection's outputs, in f32.
    outputs: u32,
    /// The sums of squares of the residual stream, `[row, group]`.
    stream_squares: u32,
    /// The sums of squares for the two later norms, `[norm, row, cube, group]`.
    squares: u32,
    /// The barriers at which the cube waits for the gate's outputs, and for the sums of squares of each norm.
    barriers: u32,
}

/// The thread's elements of the parameters that the last addition and the norm after it need. A pair is two neighboring
/// columns.
#[derive(CubeType)]
struct LastParameters<E: Float> {
    last_weights: Array<E>,
    next_weights: Array<E>,
    scalar: E,
}

/// The row and the groups of columns of a warp.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct OwnRow {
    /// The row, relative to the first row of the cluster.
    row: u32,
    /// The index of the warp among the warps of its row, which is also its first group.
    part: u32,
    /// True if the cluster has the row.
    exists: bool,
}

/// Returns the row and the first group of the unit's warp.
#[cube]
fn own_row(#[comptime] rows: RowGroups, #[comptime] plan: BlockPlan) -> OwnRow {
    let warp = UNIT_POS / comptime!(WARP as u32);
    let row = warp / comptime!(rows.warps as u32);
    OwnRow {
        row,
        part: warp % comptime!(rows.warps as u32),
        exists: row < comptime!(plan.rows as u32),
    }
}

/// Computes the block: see the module's documentation.
#[cube(launch_unchecked, address_type = "dynamic", cluster_dim = plan.cluster())]
pub(super) fn per_layer_block_pdl<E: Float, N: Size>(
    inputs: BlockInputs<E, N>,
    gate: &Tensor<u32>,
    gate_rows: WordRows,
    projection: &Tensor<u32>,
    projection_rows: WordRows,
    sum: &mut Tensor<E>,
    normed: &mut Tensor<E>,
    #[comptime] plan: BlockPlan,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let cube = CUBE_POS as u32;
    let rank = cube % comptime!(CUBES as u32);
    let first_row = cube / comptime!(CUBES as u32) * comptime!(plan.rows as u32);
    let lane = lane();
    let alone = Lane {
        warp: 0u32.runtime(),
        row: lane.row,
        column: lane.column,
    };
    let rings = Shared::<[u32]>::new_aligned_slice(comptime!(plan.ring_words()), 128usize);
    let rows = Shared::<[u32]>::new_aligned_slice(comptime!(TILE * plan.row_bytes() / 4), 16usize);
    let gated =
        Shared::<[u32]>::new_aligned_slice(comptime!(TILE * plan.gated_bytes() / 4), 16usize);
    let outputs =
        Shared::<[u32]>::new_aligned_slice(comptime!(TILE * plan.output_bytes() / 4), 16usize);
    let squares = Shared::<[u32]>::new_aligned_slice(comptime!(plan.squares_words()), 16usize);
    let barriers = Shared::<[u32]>::new_aligned_slice(comptime!(2 * BARRIERS), 8usize);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.gate().partials()));
    let places = Places {
        rows: shared_address(&rows),
        gated: shared_address(&gated),
        outputs: shared_address(&outputs),
        stream_squares: shared_address(&squares),
        squares: shared_address(&squares)
            + comptime!(4 * (TILE * plan.stream_rows().groups) as u32),
        barriers: shared_address(&barriers),
    };
    // Only after all cubes of the cluster have arrived may a cube write to the shared memory of another cube. Before
    // that, each cube says how many bytes it waits for.
    if UNIT_POS == 0u32 {
        #[unroll]
        for barrier in 0..BARRIERS {
            barrier_init(places.barriers + comptime!(8 * barrier as u32), 1usize);
        }
        barrier_init_fence();
        barrier_expect(places.barriers, comptime!(2 * plan.rows * plan.embedding));
        #[unroll]
        for norm in 0..2usize {
            barrier_expect(
                places.barriers + comptime!(8 * (norm + 1) as u32),
                comptime!(4 * plan.rows * plan.squares()),
            );
        }
    }
    cluster_arrive_relaxed();

    // Start the copies of all weights, first those of the gate.
    let gate_plan = comptime!(plan.gate());
    let gate_staging = comptime!(plan.gate_staging());
    let rings_at = shared_address(&rings);
    let gate_ring = ring_of_warp(rings_at, gate_rows, lane, gate_staging, gate_plan);
    let mut gate_addresses = Array::<u64>::new(comptime!(gate_plan.fragments()));
    let first_gate = rank * comptime!(GATES as u32);
    let gate_scales = addresses_of_weights(
        &mut gate_addresses,
        gate,
        gate_rows,
        first_gate,
        lane,
        gate_staging,
        gate_plan,
    );
    fill_ring(
        gate_ring,
        &gate_addresses,
        gate_scales,
        lane,
        gate_staging,
        gate_plan,
    );
    let projection_plan = comptime!(plan.projection());
    let projection_staging = comptime!(plan.projection_staging());
    let projection_ring = ring_of_warp(
        rings_at
            + comptime!(plan.projection_rings_at() as u32)
            + lane.warp * comptime!(projection_staging.warp_bytes(projection_plan) as u32),
        projection_rows,
        alone,
        projection_staging,
        projection_plan,
    );
    let mut projection_addresses = Array::<u64>::new(comptime!(projection_plan.fragments()));
    let own_column = lane.warp * comptime!(plan.projection_weights as u32);
    let first_column = rank * comptime!(plan.own_columns() as u32);
    let projection_scales = addresses_of_weights(
        &mut projection_addresses,
        projection,
        projection_rows,
        first_column + own_column,
        alone,
        projection_staging,
        projection_plan,
    );
    fill_ring(
        projection_ring,
        &projection_addresses,
        projection_scales,
        alone,
        projection_staging,
        projection_plan,
    );
    let parameters = last_parameters::<E, N>(&inputs, first_column, plan);

    let embeddings = add_first::<E, N>(&inputs, places, first_row, first_gate, plan);
    sync_cube();
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(gate_plan.fragments() / 2));
    #[unroll]
    for couple in 0..comptime!(gate_plan.fragments() / 2) {
        sums[couple] = Vector::<f32, Const<4>>::zeroed();
    }
    multiply_stages(
        &mut sums,
        gate_ring,
        &gate_addresses,
        gate_scales,
        rows_at(places.rows, lane, plan.row_bytes()),
        lane,
        gate_staging,
        gate_plan,
    );
    #[unroll]
    for couple in 0..comptime!(gate_plan.fragments() / 2) {
        leave_sums(&mut partial, sums[couple], lane, couple, 0usize, gate_plan);
    }
    sync_cube();
    cluster_wait();
    finish_gate(&partial, embeddings, places, first_gate, plan);
    barrier_wait(places.barriers, 0u32.runtime());

    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(projection_plan.fragments() / 2));
    #[unroll]
    for couple in 0..comptime!(projection_plan.fragments() / 2) {
        sums[couple] = Vector::<f32, Const<4>>::zeroed();
    }
    multiply_stages(
        &mut sums,
        projection_ring,
        &projection_addresses,
        projection_scales,
        rows_at(places.gated, lane, plan.gated_bytes()),
        alone,
        projection_staging,
        projection_plan,
    );
    leave_outputs(&sums, places, lane, own_column, plan);
    sync_cube();
    add_last::<E>(
        &parameters,
        places,
        first_row,
        first_column,
        rank,
        inputs.rows,
        inputs.epsilon,
        sum,
        normed,
        plan,
    );
}

/// Returns the place of the input rows of a GEMM in shared memory.
#[cube]
fn rows_at(place: u32, lane: Lane, #[comptime] row_bytes: usize) -> InputRows {
    InputRows {
        address: u64::cast_from(place + lane.row * comptime!(row_bytes as u32)),
        tile_distance: 0u64.runtime(),
        is_there: 1u32.runtime(),
    }
}

/// Computes the addresses from which the thread copies the codes of its warp's first stage, and returns the address from
/// which it copies scales. `first` is the warp's first weight row.
#[cube]
fn addresses_of_weights(
    codes: &mut Array<u64>,
    words: &Tensor<u32>,
    word_rows: WordRows,
    first: u32,
    lane: Lane,
    #[comptime] staging: Staging,
    #[comptime] plan: ProjectPlan,
) -> u64 {
    let own_code = first_code(lane);
    let own_scale = first_scale(word_rows.scales, lane, staging);
    let mut scales = 0u64;
    #[unroll]
    for fragment in 0..comptime!(plan.fragments()) {
        let row = first + comptime!((fragment * PRODUCT_ROWS) as u32) + lane.row;
        let start = u64::cast_from(row) * u64::cast_from(word_rows.stride);
        codes[fragment] = address(words, start + u64::cast_from(own_code));
        if copies_scales(lane, fragment) {
            scales = address(words, start + u64::cast_from(own_scale));
        }
    }
    scales
}

/// Loads the thread's parameters of the last addition before the wait for the previous launch.
#[cube]
fn last_parameters<E: Float, N: Size>(
    inputs: &BlockInputs<E, N>,
    first_column: u32,
    #[comptime] plan: BlockPlan,
) -> LastParameters<E> {
    let rows = comptime!(plan.own_rows());
    let own = own_row(rows, plan);
    let elements = comptime!(2 * rows.held());
    let mut last_weights = Array::<E>::new(elements);
    let mut next_weights = Array::<E>::new(elements);
    #[unroll]
    for index in 0..rows.held() {
        let group = group_of(own, index, rows);
        #[unroll]
        for element in 0..2usize {
            let column = (first_column + column_of(group) + comptime!(element as u32)) as usize;
            let at = comptime!(2 * index + element);
            last_weights[at] = load_element_now(inputs.last_weight.as_slice(), column, plan.pdl);
            next_weights[at] = load_element_now(inputs.next_weight.as_slice(), column, plan.pdl);
        }
    }
    LastParameters::<E> {
        last_weights,
        next_weights,
        scalar: load_element_now(inputs.scalar.as_slice(), 0usize, plan.pdl),
    }
}

/// Returns the warp's group with number `index`, or its first group if the row has no such group.
#[cube]
fn group_of(own: OwnRow, #[comptime] index: usize, #[comptime] rows: RowGroups) -> u32 {
    let group = own.part + comptime!((index * rows.warps) as u32);
    if comptime!(rows.held() * rows.warps > rows.groups && index + 1 == rows.held()) {
        select(group < comptime!(rows.groups as u32), group, own.part)
    } else {
        group
    }
}

/// True if the row has the warp's group with number `index`.
#[cube]
fn has_group(own: OwnRow, #[comptime] index: usize, #[comptime] rows: RowGroups) -> bool {
    own.exists && own.part + comptime!((index * rows.warps) as u32) < comptime!(rows.groups as u32)
}

/// Returns the first of the cube's columns in the thread's pair of a group.
#[cube]
fn column_of(group: u32) -> u32 {
    2u32 * (UNIT_POS % comptime!(WARP as u32)) + group * comptime!(2 * WARP as u32)
}

/// Computes `x = stream + norm(added)` in shared memory. Waits for the previous launch, and returns the two elements of
/// the layer's embedding that the thread multiplies in [`finish_gate`]. Synchronizes the cube.
#[cube]
fn add_first<E: Float, N: Size>(
    inputs: &BlockInputs<E, N>,
    places: Places,
    first_row: u32,
    first_gate: u32,
    #[comptime] plan: BlockPlan,
) -> Vector<f32, Const<2>> {
    let rows = comptime!(plan.stream_rows());
    let held = comptime!(rows.held());
    let own = own_row(rows, plan);
    let of_row = comptime!((2 * plan.columns / PIECE_BYTES) as u32);
    let of_lane = UNIT_POS % comptime!(WARP as u32);
    let stream = &inputs.stream;
    let added = &inputs.added;
    let embedding = &inputs.embedding;
    let mut weights = Array::<Vector<E, N>>::new(held);
    let mut blocks = Array::<Vector<E, N>>::new(held);
    let mut streams = Array::<Vector<E, N>>::new(held);
    #[unroll]
    for index in 0..held {
        let vector = group_of(own, index, rows) * comptime!(WARP as u32) + of_lane;
        weights[index] = load_now(&inputs.norm_weight, vector as usize, plan.pdl);
    }
    wait_prior_launch(plan.pdl);
    mark_volatile(stream, plan.pdl);
    mark_volatile(added, plan.pdl);
    mark_volatile(embedding, plan.pdl);

    // Rows beyond the last row are copies of it, and are written to no tensor.
    let from = min(first_row + own.row, inputs.rows - 1u32) * of_row;
    if own.exists {
        #[unroll]
        for index in 0..held {
            let vector = group_of(own, index, rows) * comptime!(WARP as u32) + of_lane;
            blocks[index] = added[(from + vector) as usize];
            streams[index] = stream[(from + vector) as usize];
        }
    }
    let mut embeddings = Vector::<f32, Const<2>>::zeroed();
    let pair = UNIT_POS;
    if pair < comptime!((plan.rows * GATES / 2) as u32) {
        let row = first_row + pair / comptime!((GATES / 2) as u32);
        let column = first_gate + 2u32 * (pair % comptime!((GATES / 2) as u32));
        let place = &inputs.embedding_place;
        let at = min(row, inputs.rows - 1u32) as usize * place.stride as usize
            + (place.start + column) as usize;
        embeddings.insert(0usize, f32::cast_from(embedding[at]));
        embeddings.insert(1usize, f32::cast_from(embedding[at + 1]));
    }
    launch_dependents(plan.pdl);

    let squares = places.stream_squares + own.row * comptime!(4 * rows.groups as u32);
    #[unroll]
    for index in 0..held {
        if has_group(own, index, rows) {
            let sum = plane_sum(sum_of_squares(blocks[index]));
            if of_lane == 0u32 {
                let group = group_of(own, index, rows);
                store_shared(squares + 4u32 * group, u32::reinterpret(sum));
            }
        }
    }
    sync_cube();
    if own.exists {
        let mut sum = 0.0f32;
        #[unroll]
        for group in 0..rows.groups {
            sum += f32::reinterpret(load_shared(squares + comptime!(4 * group as u32)));
        }
        let factor = Vector::<f32, N>::cast_from(factor_of(sum, inputs.epsilon, plan));
        let row = places.rows + own.row * comptime!(plan.row_bytes() as u32);
        #[unroll]
        for index in 0..held {
            if has_group(own, index, rows) {
                let of_block = Vector::<f32, N>::cast_from(blocks[index])
                    * factor
                    * Vector::<f32, N>::cast_from(weights[index]);
                let of_block = Vector::<f32, N>::cast_from(Vector::<E, N>::cast_from(of_block));
                let both = Vector::<E, N>::cast_from(
                    Vector::<f32, N>::cast_from(streams[index]) + of_block,
                );
                let vector = group_of(own, index, rows) * comptime!(WARP as u32) + of_lane;
                store_shared_four(
                    row + vector * comptime!(PIECE_BYTES as u32),
                    Vector::<u32, Const<4>>::reinterpret(both),
                );
            }
        }
    }
    embeddings
}

/// Returns the factor of a row's norm for the sum of the row's squares.
#[cube]
fn factor_of(squares: f32, epsilon: f32, #[comptime] plan: BlockPlan) -> f32 {
    let mean = squares / comptime!(plan.columns as f32);
    1.0f32 / (mean + epsilon).sqrt()
}

/// Adds up the warps' sums of the gate, applies GELU and the embedding, and writes the outputs to the shared memory of
/// all cubes.
#[cube]
fn finish_gate(
    partial: &Shared<[f32]>,
    embeddings: Vector<f32, Const<2>>,
    places: Places,
    first_gate: u32,
    #[comptime] plan: BlockPlan,
) {
    let pair = UNIT_POS;
    if pair < comptime!((plan.rows * GATES / 2) as u32) {
        let row = pair / comptime!((GATES / 2) as u32);
        let gate = 2u32 * (pair % comptime!((GATES / 2) as u32));
        let gate_plan = comptime!(plan.gate());
        let first = gelu(sum_of_parts(partial, row, gate, gate_plan)) * embeddings.extract(0usize);
        let second =
            gelu(sum_of_parts(partial, row, gate + 1u32, gate_plan)) * embeddings.extract(1usize);
        let word = f32::reinterpret(pack(first, second, plan.gate_codes.half));
        let at =
            places.gated + row * comptime!(plan.gated_bytes() as u32) + 2u32 * (first_gate + gate);
        #[unroll]
        for cube in 0..CUBES {
            let cube = comptime!(cube as u32).runtime();
            let barrier = remote_address(places.barriers, cube);
            store_remote_async(remote_address(at, cube), word, barrier);
        }
    }
}

/// Writes a warp's outputs of the projection to shared memory. The thread has the outputs of two neighboring rows, first
/// for a weight row of the upper fragment, then for one of the lower fragment.
#[cube]
fn leave_outputs(
    sums: &Array<Vector<f32, Const<4>>>,
    places: Places,
    lane: Lane,
    own_column: u32,
    #[comptime] plan: BlockPlan,
) {
    #[unroll]
    for couple in 0..comptime!(plan.projection().fragments() / 2) {
        let sum = sums[couple];
        #[unroll]
        for element in 0..4usize {
            let fragment = comptime!(2 * couple + element / 2);
            let row = comptime!((element % 2) as u32) + 2u32 * lane.column;
            let column = own_column + comptime!((fragment * PRODUCT_ROWS) as u32) + lane.row;
            store_shared(
                places.outputs + row * comptime!(plan.output_bytes() as u32) + 4u32 * column,
                u32::reinterpret(sum.extract(element)),
            );
        }
    }
}

/// Computes the cube's columns of `sum = (x + norm(projected)) · scalar` and of `norm(sum)`.
#[cube]
fn add_last<E: Float>(
    parameters: &LastParameters<E>,
    places: Places,
    first_row: u32,
    first_column: u32,
    rank: u32,
    all_rows: u32,
    epsilon: f32,
    sum: &mut Tensor<E>,
    normed: &mut Tensor<E>,
    #[comptime] plan: BlockPlan,
) {
    let rows = comptime!(plan.own_rows());
    let held = comptime!(rows.held());
    let own = own_row(rows, plan);
    let half = comptime!(plan.gate_codes.half);
    let row = first_row + own.row;
    let mut values = Array::<f32>::new(comptime!(2 * held));
    let outputs = places.outputs + own.row * comptime!(plan.output_bytes() as u32);
    #[unroll]
    for index in 0..held {
        if has_group(own, index, rows) {
            let group = group_of(own, index, rows);
            let both = load_shared_pair(outputs + 4u32 * column_of(group));
            #[unroll]
            for element in 0..2usize {
                // Round the projection's outputs as a launch of its own would.
                values[comptime!(2 * index + element)] =
                    f32::cast_from(E::cast_from(both.extract(element)));
            }
            send_squares(&values, places, own, rank, 0usize, index, plan);
        }
    }
    let factor = norm_factor(places, own, epsilon, 0usize, plan);
    let scalar = f32::cast_from(parameters.scalar);
    let stream = places.rows + own.row * comptime!(plan.row_bytes() as u32) + 2u32 * first_column;
    #[unroll]
    for index in 0..held {
        if has_group(own, index, rows) {
            let group = group_of(own, index, rows);
            let before = unpack(load_shared(stream + 2u32 * column_of(group)), half);
            #[unroll]
            for element in 0..2usize {
                let at = comptime!(2 * index + element);
                let weight = f32::cast_from(parameters.last_weights[at]);
                let of_block = f32::cast_from(E::cast_from(values[at] * factor * weight));
                let both = f32::cast_from(E::cast_from(before.extract(element) + of_block));
                values[at] = f32::cast_from(E::cast_from(both * scalar));
            }
            send_squares(&values, places, own, rank, 1usize, index, plan);
        }
    }
    let at_row = row as usize * plan.columns + first_column as usize;
    #[unroll]
    for index in 0..held {
        if has_group(own, index, rows) && row < all_rows {
            let at = at_row + column_of(group_of(own, index, rows)) as usize;
            #[unroll]
            for element in 0..2usize {
                sum[at + element] = E::cast_from(values[comptime!(2 * index + element)]);
            }
        }
    }
    let factor = norm_factor(places, own, epsilon, 1usize, plan);
    #[unroll]
    for index in 0..held {
        if has_group(own, index, rows) && row < all_rows {
            let at = at_row + column_of(group_of(own, index, rows)) as usize;
            #[unroll]
            for element in 0..2usize {
                let place = comptime!(2 * index + element);
                let weight = f32::cast_from(parameters.next_weights[place]);
                normed[at + element] = E::cast_from(values[place] * factor * weight);
            }
        }
    }
}

/// Sends the squares of a group to all cubes.
#[cube]
fn send_squares(
    values: &Array<f32>,
    places: Places,
    own: OwnRow,
    rank: u32,
    #[comptime] norm: usize,
    #[comptime] index: usize,
    #[comptime] plan: BlockPlan,
) {
    let rows = comptime!(plan.own_rows());
    let first = values[comptime!(2 * index)];
    let second = values[comptime!(2 * index + 1)];
    let sum = plane_sum(first * first + second * second);
    let of_lane = UNIT_POS % comptime!(WARP as u32);
    if of_lane < comptime!(CUBES as u32) {
        let at = squares_of_row(places, own, norm, plan)
            + 4u32 * (rank * comptime!(rows.groups as u32) + group_of(own, index, rows));
        let barrier = places.barriers + comptime!(8 * (norm + 1) as u32);
        store_remote_async(
            remote_address(at, of_lane),
            sum,
            remote_address(barrier, of_lane),
        );
    }
}

/// Returns the address of the sums of squares of the warp's row, for a norm.
#[cube]
fn squares_of_row(
    places: Places,
    own: OwnRow,
    #[comptime] norm: usize,
    #[comptime] plan: BlockPlan,
) -> u32 {
    let first = comptime!((4 * norm * TILE * plan.squares()) as u32);
    places.squares + first + own.row * comptime!(4 * plan.squares() as u32)
}

/// Waits for the squares of all cubes, and returns the factor of the norm of the warp's row.
#[cube]
fn norm_factor(
    places: Places,
    own: OwnRow,
    epsilon: f32,
    #[comptime] norm: usize,
    #[comptime] plan: BlockPlan,
) -> f32 {
    barrier_wait(
        places.barriers + comptime!(8 * (norm + 1) as u32),
        0u32.runtime(),
    );
    let mut sum = 0.0f32;
    if own.exists {
        let from = squares_of_row(places, own, norm, plan);
        let mut sums = load_shared_four(from);
        #[unroll]
        for four in 1..comptime!(plan.squares() / 4) {
            sums += load_shared_four(from + comptime!(16 * four as u32));
        }
        #[unroll]
        for part in 0..4usize {
            sum += sums.extract(part);
        }
    }
    factor_of(sum, epsilon, plan)
}
