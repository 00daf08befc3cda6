//! GEMM of a batch of input rows on Hopper: `output[r, o] = Σ input[r, i] · weight[o, i]`, accumulated in f32.
//!
//! Algorithm: the weights are the left operand of `wgmma`, and the input rows are the right operand. A cube computes 64
//! or 128 outputs of all input rows, so that each weight is read once. Several cubes may divide the inner dimension
//! (split-K). These cubes form a cluster, and add up their sums through distributed shared memory in a fixed order.
//!
//! Tensors: input `[rows, columns in]`, weights `[columns out, columns in]`, output `[rows, columns out]`, in f16 or
//! bf16.
//!
//! Budget: shared memory holds a ring buffer and the partial sums. Both are small enough that two cubes fit on a
//! multiprocessor. A chunk is 64 elements of the inner dimension. A stage of the ring buffer holds one chunk of the
//! weights and of the input rows. A consumer thread has at most 64 accumulator registers.
//!
//! Schedule: warp specialization. One thread of the producer warp fills the ring buffer by TMA. If no launch writes the
//! weights, this thread fills the stages with weights before it waits for the previous launch (PDL). After the wait,
//! the thread fills the stages with input rows.
//!
//! Bound: memory bandwidth. The weights of 64 outputs and one chunk take 8 KB. With its share of the memory bandwidth,
//! a multiprocessor loads these weights in 450 clocks. The tensor cores multiply the weights by 64 input rows in 128
//! clocks.

use super::super::concat::{ConcatRows, Side, side_of_cube};
use super::super::sums::{Epilogue, EpilogueInputs};
use super::finish::{finish_outputs, leave_partials, received_bytes};
use super::plan::BatchPlan;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::cluster::{cluster_arrive, cluster_arrive_relaxed, cluster_wait};
use cube_kit::hopper::gemm::mainloop::multiply_matrices;
use cube_kit::hopper::gemm::ring::{Ring, prepare_ring};
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{
    barrier_expect, barrier_expect_bytes, barrier_init_fence, barrier_wait, tma_load,
};
use cube_kit::hopper::tma::tensor_map_address;
use cube_kit::hopper::wgmma::descriptor;
use cube_kit::nvidia::mbarrier::barrier_init;
use cube_kit::nvidia::ptx::{named_barrier, uniform};
use cube_kit::pdl::{launch_dependents, mark_owned_volatile_if_present, wait_prior_launch};
use cubecl::prelude::*;

/// The index of the named barrier that synchronizes the consumer warpgroup.
const CONSUMER_BARRIER: u32 = 1;

/// The tensor maps of a GEMM with up to three matrices. If the second or third matrix does not exist, the map of the
/// first matrix takes its place.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Maps {
    input: u64,
    first: u64,
    second: u64,
    third: u64,
}

/// The chunks of the inner dimension that a cube multiplies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Chunks {
    first: u32,
    count: u32,
}

/// Multiplies `input` by the transposes of the matrices. If `plan.gated`, multiplies the second matrix's output by the
/// GELU of the first matrix's output. Otherwise concatenates the outputs. `rows` is the number of input rows, and
/// `chunks` is the number of chunks of the inner dimension.
#[cube(launch_unchecked, address_type = "dynamic", cluster_dim = plan.cluster())]
pub(super) fn project_batch_by_wgmma_pdl<E: Float, N: Size>(
    input: &TensorMap<E, Tiled>,
    first: &TensorMap<E, Tiled>,
    second: &TensorMap<E, Tiled>,
    third: &TensorMap<E, Tiled>,
    matrices: ConcatRows,
    epilogue_inputs: EpilogueInputs<E>,
    output: &mut Tensor<Vector<E, Const<4>>>,
    rows: u32,
    chunks: u32,
    #[comptime] plan: BatchPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
    #[define(N)] _sums: usize,
) {
    let parts = comptime!(plan.parts as u32);
    let cube = CUBE_POS as u32;
    let rank = cube % parts;
    let side = side_of_cube(cube / parts, matrices, plan.sides);
    let maps = Maps {
        input: tensor_map_address(input),
        first: tensor_map_address(first),
        second: tensor_map_address(second),
        third: tensor_map_address(third),
    };
    let begin = chunks * rank / parts;
    let own = Chunks {
        first: begin,
        count: chunks * (rank + 1u32) / parts - begin,
    };
    let first_output = side.cube * comptime!(plan.outputs() as u32);
    let ring = prepare_ring(comptime!(plan.ring()));
    let partials = ring.stages + comptime!(plan.partials_at() as u32);
    let is_split = comptime!(plan.parts > 1);
    let sums_barrier = ring.stages + comptime!(plan.sums_barrier_at() as u32);
    let has_signals = comptime!(plan.has_signals());
    // Only after all cubes of the cluster have arrived may a cube write to the shared memory of another cube. Before
    // that, each cube says how many bytes of partial sums it waits for.
    if is_split {
        if has_signals && UNIT_POS == 0u32 {
            barrier_init(sums_barrier, 1usize);
            barrier_init_fence();
            barrier_expect_bytes(sums_barrier, received_bytes(rank, rows, plan));
        }
        cluster_arrive_relaxed();
    }
    if UNIT_POS >= comptime!(WARPGROUP as u32) {
        if UNIT_POS == comptime!(WARPGROUP as u32) {
            fetch(maps, side, first_output, own, ring, plan);
        }
        if is_split {
            cluster_wait();
            if !has_signals {
                cluster_arrive();
                cluster_wait();
            }
        }
    } else {
        wait_prior_launch(plan.pdl);
        mark_owned_volatile_if_present(&epilogue_inputs.factor, plan.pdl);
        let elected = u32::cast_from(UNIT_POS.is_multiple_of(32u32));
        let sums = multiply_matrices::<N>(
            uniform(descriptor(ring.stages)),
            uniform(descriptor(ring.stages + comptime!(plan.input_at() as u32))),
            ring.full,
            ring.empty,
            elected,
            own.count,
            0u32.runtime(),
            0u32.runtime(),
            comptime!(plan.mainloop()),
        );
        if is_split {
            cluster_wait();
        }
        leave_partials::<N>(sums, partials, sums_barrier, rank, rows, plan);
        if has_signals {
            barrier_wait(sums_barrier, 0u32.runtime());
        } else if is_split {
            cluster_arrive();
            cluster_wait();
        } else {
            named_barrier(CONSUMER_BARRIER, WARPGROUP);
        }
        finish_outputs::<E>(
            partials,
            &epilogue_inputs,
            output,
            side,
            first_output,
            rank,
            rows,
            plan,
            epilogue,
        );
    }
}

/// Copies the cube's chunks of the weights and of the input rows. This function is the loop of the producer.
#[cube]
fn fetch(
    maps: Maps,
    side: Side,
    first_output: u32,
    own: Chunks,
    ring: Ring,
    #[comptime] plan: BatchPlan,
) {
    wait_prior_launch(comptime!(plan.pdl && !plan.reads_ahead));
    let ahead = min(own.count, comptime!(plan.stages as u32));
    let mut chunk = 0u32;
    while chunk < ahead {
        barrier_expect(ring.full + 8u32 * chunk, comptime!(plan.stage_bytes()));
        load_weights(maps, side, first_output, own, chunk, chunk, ring, plan);
        chunk += 1u32;
    }
    wait_prior_launch(plan.reads_ahead);
    chunk = 0u32;
    while chunk < ahead {
        load_input(maps, own, chunk, chunk, ring, plan);
        chunk += 1u32;
    }
    while chunk < own.count {
        let state = pipeline_state(chunk, plan.stages);
        barrier_wait(ring.empty + 8u32 * state.stage, 1u32 - state.parity);
        barrier_expect(
            ring.full + 8u32 * state.stage,
            comptime!(plan.stage_bytes()),
        );
        load_weights(
            maps,
            side,
            first_output,
            own,
            chunk,
            state.stage,
            ring,
            plan,
        );
        load_input(maps, own, chunk, state.stage, ring, plan);
        chunk += 1u32;
    }
    launch_dependents(plan.pdl);
}

/// Copies a chunk of the cube's weights to a stage of the ring buffer.
#[cube]
fn load_weights(
    maps: Maps,
    side: Side,
    first_output: u32,
    own: Chunks,
    chunk: u32,
    stage: u32,
    ring: Ring,
    #[comptime] plan: BatchPlan,
) {
    let target = ring.stages + stage * comptime!(plan.stage_bytes() as u32);
    let full = ring.full + 8u32 * stage;
    let inner = (own.first + chunk) * comptime!(BatchPlan::DEPTH as u32);
    let row = first_output as i32;
    if comptime!(plan.gated) {
        tma_load(target, maps.first, 0u32, 0u32, row, inner, full);
        let second = target + comptime!(plan.input_at() as u32 / 2);
        tma_load(second, maps.second, 0u32, 0u32, row, inner, full);
    } else {
        tma_load(
            target,
            map_of(maps, side, plan),
            0u32,
            0u32,
            row,
            inner,
            full,
        );
    }
}

/// Returns the tensor map of the matrix that a cube multiplies by.
#[cube]
fn map_of(maps: Maps, side: Side, #[comptime] plan: BatchPlan) -> u64 {
    let mut map = maps.first;
    if comptime!(plan.sides > 1) {
        if side.number == 1u32 {
            map = maps.second;
        } else if side.number == 2u32 {
            map = maps.third;
        }
    }
    map
}

/// Copies a chunk of the input rows to a stage of the ring buffer.
#[cube]
fn load_input(
    maps: Maps,
    own: Chunks,
    chunk: u32,
    stage: u32,
    ring: Ring,
    #[comptime] plan: BatchPlan,
) {
    let target = ring.stages
        + stage * comptime!(plan.stage_bytes() as u32)
        + comptime!(plan.input_at() as u32);
    let inner = (own.first + chunk) * comptime!(BatchPlan::DEPTH as u32);
    let full = ring.full + 8u32 * stage;
    tma_load(target, maps.input, 0u32, 0u32, 0i32, inner, full);
}
