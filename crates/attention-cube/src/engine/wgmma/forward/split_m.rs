//! The forward on Hopper for values up to 256 wide: each warpgroup has 64 queries and all columns of their
//! output.
//!
//! Budget. Shared memory ([`SplitMTiles::shared_memory`]): the queries, and a ring of `stages` blocks of keys
//! and of values. Registers a thread, at head size 256: 128 of O, 40 of S, 20 of P, and 20 of the next P
//! while S becomes it; `setmaxnreg` takes them from the warpgroup that only fetches. A block of `keys` keys
//! takes the tensor cores `rows · keys · (head_dim + value_dim) / 2048` clocks, and the shared memory a
//! little less (P stays in registers): the matrix unit bounds head sizes from 128 on, the exponentials 64.
//!
//! Schedule. One thread of the fetching warpgroup keeps the ring full; everybody else, block by block:
//! issue `S' = Q K'ᵀ` of the next block; rescale O; issue `O += P V`; wait for S'; make P' of it while the
//! matrix unit is at `P V`; wait for O. A stage is free when a lane of each warp has said so. Where warpgroups issue in turns,
//! all that a warpgroup can do before its turn is done there: each waits for the sum of all turns.

mod biases;
mod probabilities;
mod producer;
mod products;
mod zero_fill;

use self::biases::biases_of;
use self::probabilities::{packed, softmax};
use self::producer::{Places, fetch, places};
use self::products::{take_output, take_scores};
use self::zero_fill::{first_row_hides, may_have_masked_in, tell_used_by, zero_fill_values};
use super::scheduler::{init_notices, notice_bytes, notices_at, told_item};
use crate::engine::wgmma::forward::copies::{Steps, zero_fill_other_queries};
use crate::engine::wgmma::output::{Target, write_tile};
use crate::engine::wgmma::plan::SplitMTiles;
use crate::fragment::RowPair;
use crate::fragment::bias::BiasWords;
use crate::fragment::output::Finished;
use crate::fragment::score::score;
use crate::fragment::scoring::{Scoring, scoring};
use crate::fragment::softmax::{empty_state, rescale, totals};
use crate::fragment::view::view;
use crate::fragment::visits::{next_block, tile_position};
use crate::fragment::work_tile::{AssignedTile, TileKind, TileScheduler, assigned_tile, row_pair};
use crate::math::schedule::{Grid, Schedule};
use crate::math::score::ScoreArguments;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::hopper::accumulator::pair;
use cube_kit::hopper::barriers::{ordering_barrier_arrive, ordering_barrier_wait};
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{
    barrier_arrive, barrier_init, barrier_init_fence, barrier_wait, barrier_wait_both,
    setmaxnreg_dec, setmaxnreg_inc, shared_address, store_shared, uniform,
};
use cube_kit::hopper::tma::await_stores;
use cube_kit::hopper::wgmma::{
    descriptor, multiply_output, multiply_scores, transposed_descriptor,
};
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES, WARPGROUP};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_split_m<
    E: Float,
    O: Float,
    F: Float,
    K: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NP: Size,
    NO: Size,
>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    tma_bias: &TensorMap<E, Tiled>,
    mask: ComptimeOption<&Tensor<u32>>,
    bias: ComptimeOption<&Tensor<Vector<F, NB>>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    sinks: ComptimeOption<&Tensor<K>>,
    output_tma_tiles: &TensorMap<E, Tiled>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    grid: Grid,
    schedule: Schedule,
    extent: Extent,
    arguments: ScoreArguments,
    steps: Steps,
    mask_places: MaskPlaces,
    group: u32,
    power: f32,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
    #[comptime] stores_output_by_tma: bool,
    #[define(E)] _element: ElemType,
    #[define(O)] _output_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(K)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NP, NO)] _fragments: [usize; 3],
) {
    let scoring = scoring::<F, NB>(extent, lengths_and_ids, mask, mask_places, bias, arguments);
    let masking = &scoring.masking;
    let scheduler = TileScheduler {
        grid,
        schedule,
        group,
    };
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!((tiles.shared_memory() + notice_bytes(kind)) / 4),
        1024usize,
    );
    let start = shared_address(&memory);
    let places = places(start, tiles);
    let notices = notices_at(start, comptime!(tiles.shared_memory()), kind);
    let consumers = comptime!(tiles.warpgroups * WARPGROUP);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(places.key_full + at, 1usize);
            barrier_init(places.key_empty + at, comptime!(4 * tiles.warpgroups));
            barrier_init(places.value_full + at, 1usize);
            barrier_init(places.value_empty + at, comptime!(4 * tiles.warpgroups));
        }
        barrier_init(places.queries_full, 1usize);
        barrier_init(places.queries_empty, comptime!(4 * tiles.warpgroups));
        #[unroll]
        for turn in 0..3u32 {
            barrier_init(
                places.used_told + 8u32 * turn,
                comptime!(4 * tiles.warpgroups),
            );
        }
        #[unroll]
        for stage in 0..tiles.bias_stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(places.bias_full + at, 1usize);
            barrier_init(places.bias_empty + at, comptime!(4 * tiles.warpgroups));
        }
        init_notices(notices, comptime!(4 * tiles.warpgroups), kind);
        barrier_init_fence();
        if comptime!(kind.leaves_masked()) {
            #[unroll]
            for word in 0..12usize {
                store_shared(places.used + comptime!(4 * word as u32), 0u32);
            }
        }
    }
    zero_fill_other_queries(
        places.queries,
        &masking.extent,
        comptime!(tiles.rows()),
        comptime!(tiles.key_subtiles()),
        comptime!(tiles.units()),
        kind,
    );
    sync_cube();

    if UNIT_POS >= comptime!(consumers as u32) {
        setmaxnreg_dec(comptime!(tiles.thread_registers()[0]));
        if UNIT_POS == comptime!(consumers as u32) {
            fetch(
                query, key, value, tma_bias, masking, &scheduler, &steps, &places, notices, tiles,
                kind,
            );
        }
    } else {
        setmaxnreg_inc(comptime!(tiles.thread_registers()[1]));
        let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
        let lane = UNIT_POS % 32u32;
        let elected = u32::cast_from(lane == 0u32);
        let thread = Thread { warpgroup, elected };
        // The row of the thread's first register, in the tile.
        let row = (UNIT_POS / 32u32 * 16u32 + lane / 4u32) as i32;
        let target = Target {
            staging: places.output + warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32),
            row,
            first_row: (warpgroup * comptime!(PRODUCT_ROWS as u32)) as i32,
            first_column: 0u32,
            map: tensor_map_address(output_tma_tiles),
        };
        if comptime!(tiles.orders_warpgroups) {
            // The first turn is the first warpgroup's.
            if warpgroup == comptime!(tiles.warpgroups as u32 - 1) {
                ordering_barrier_arrive(warpgroup, tiles.warpgroups);
            }
        }

        let mut item = CUBE_POS as u32;
        let mut turn = 0u32;
        let mut tiles_done = 0u32;
        let mut visited = 0u32;
        let mut masked = 0u32;
        while item < scheduler.schedule.items {
            let assigned_tile = assigned_tile(
                &scheduler,
                item,
                turn,
                masking,
                comptime!(tiles.rows()),
                tiles.keys,
                kind,
            );
            if assigned_tile.exists {
                let tile = assigned_tile.tile;
                let rows = row_pair::<F, NB>(&tile, &scoring, row, kind);
                let attended = attend::<F, NB, NS, NP, NO>(
                    &assigned_tile,
                    &rows,
                    &scoring,
                    &places,
                    thread,
                    tiles_done % 2u32,
                    Visited {
                        blocks: visited,
                        masked,
                    },
                    power,
                    tiles,
                    kind,
                );
                visited = attended.visited.blocks;
                masked = attended.visited.masked;
                // Queries are not read any more; a place that is shared with the output, not yet.
                if comptime!(tiles.has_output_place() || !stores_output_by_tma) {
                    barrier_arrive(places.queries_empty, elected);
                }
                write_tile::<O, K, N, NO>(
                    attended.finished,
                    target,
                    true,
                    &tile,
                    &rows,
                    &sinks,
                    output,
                    logsumexp,
                    &arguments,
                    comptime!(tiles.output_shape(stores_output_by_tma)),
                    kind.fragment,
                );
                if comptime!(!tiles.has_output_place() && stores_output_by_tma) {
                    barrier_arrive(places.queries_empty, elected);
                }
                tiles_done += 1u32;
            }
            item = told_item(&scheduler.schedule, item, turn, notices, elected, kind);
            turn += 1u32;
        }
        if comptime!(stores_output_by_tma) {
            await_stores();
        }
    }
}

/// A thread that multiplies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Thread {
    warpgroup: u32,
    /// 1 for the lane that speaks for its warp, else 0.
    elected: u32,
}

/// The blocks that a cube has visited, and how many of them may have had holes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Visited {
    blocks: u32,
    masked: u32,
}

/// A tile's part of a warpgroup, and what the cube has visited.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Attended<NO: Size> {
    finished: Finished<NO>,
    visited: Visited,
}

/// Visits a tile's blocks, after those of other tiles.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
fn attend<F: Float, NB: Size, NS: Size, NP: Size, NO: Size>(
    assigned_tile: &AssignedTile,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    places: &Places,
    thread: Thread,
    queries_parity: u32,
    visited: Visited,
    power: f32,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
) -> Attended<NO> {
    let masking = &scoring.masking;
    let tile = &assigned_tile.tile;
    let tile_position = tile_position(tile);
    let warpgroup = thread.warpgroup;
    let elected = thread.elected;
    let negative_infinity = scoring.arguments.negative_infinity;
    let query_operand = uniform(descriptor(
        places.queries + warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32),
    ));
    let key_operand = descriptor(places.keys);
    let value_operand = transposed_descriptor(places.values, comptime!(tiles.keys * ROW_BYTES));
    let key_stage = comptime!((tiles.key_bytes() >> 4) as u32);
    let value_stage = comptime!((tiles.value_bytes() >> 4) as u32);

    let mut o = Vector::<f32, NO>::zeroed();
    let mut softmax_state = empty_state(negative_infinity);
    let mut count = uniform(visited.blocks);
    let mut masked = visited.masked;
    barrier_wait(places.queries_full, queries_parity);
    if assigned_tile.first < tile.end_block {
        let mut block = assigned_tile.first;
        let slot = pipeline_state(count, tiles.stages);
        let key_block = uniform(key_operand + slot.stage * key_stage);
        barrier_wait(places.key_full + 8u32 * slot.stage, slot.parity);
        let started =
            multiply_scores::<NS>(query_operand, key_block, comptime!(tiles.score_product()));
        let seen = view(
            &tile_position,
            rows,
            block,
            0u32,
            masking,
            tiles.keys,
            tiles.keys,
            kind,
        );
        let hides = first_row_hides::<F, NB>(&scoring.bias, tile, block, seen.whole, tiles, kind);
        let biases = biases_of::<F, NB>(scoring, rows, block, count, places, thread, tiles, kind);
        let s = take_scores::<NS>(
            started,
            places.key_empty + 8u32 * slot.stage,
            elected,
            0usize,
            tiles,
        );
        let mut may_have_masked = may_have_masked_in(&seen, hides, kind);
        let s = score::<F, NB, NS>(
            s,
            block * comptime!(tiles.keys as i32),
            &seen,
            rows,
            biases,
            scoring,
            tiles.keys,
            kind.fragment,
        );
        let made = softmax::<NS>(s, softmax_state, power, negative_infinity, tiles);
        // Carried through the loop as `softmax_state` itself, it costs D128 registers' moves and 5 % (docs/forward-split-m.md).
        let mut running = made.softmax_state;
        // There is no older output yet.
        running.moved = false.runtime();
        running.factor = pair(1.0f32, 1.0f32);
        let mut p = packed::<NS, NP>(made.numerators, tiles);
        let mut masked_count = visited.masked;
        if comptime!(kind.leaves_masked()) {
            if may_have_masked {
                tell_used_by(places, p, masked_count, elected, tiles);
            }
        }

        let mut next = next_block(tile, block + 1i32, masking, kind);
        while next < tile.end_block {
            let slot = pipeline_state(count, tiles.stages);
            let next_slot = pipeline_state(count + 1u32, tiles.stages);
            zero_fill_values(
                places,
                tile,
                &masking.extent,
                block,
                slot,
                may_have_masked,
                masked_count,
                false,
                tiles,
                kind,
            );
            let key_block = uniform(key_operand + next_slot.stage * key_stage);
            let value_block = uniform(value_operand + slot.stage * value_stage);
            let key_full = places.key_full + 8u32 * next_slot.stage;
            let value_full = places.value_full + 8u32 * slot.stage;
            let mut biases = BiasWords::zeroed();
            if comptime!(tiles.orders_warpgroups) {
                // In its turn a warpgroup keeps the others waiting.
                biases = biases_of::<F, NB>(
                    scoring,
                    rows,
                    next,
                    count + 1u32,
                    places,
                    thread,
                    tiles,
                    kind,
                );
                barrier_wait_both(key_full, next_slot.parity, value_full, slot.parity);
                o = rescale::<NO>(
                    o,
                    running.moved,
                    running.factor,
                    comptime!(tiles.value_columns()),
                );
                ordering_barrier_wait(warpgroup);
            } else {
                barrier_wait(key_full, next_slot.parity);
            }
            let started =
                multiply_scores::<NS>(query_operand, key_block, comptime!(tiles.score_product()));
            if comptime!(!tiles.orders_warpgroups) {
                o = rescale::<NO>(
                    o,
                    running.moved,
                    running.factor,
                    comptime!(tiles.value_columns()),
                );
                barrier_wait(value_full, slot.parity);
            }
            o = multiply_output::<NO, NP>(o, p, value_block, comptime!(tiles.output_product()));
            if comptime!(tiles.orders_warpgroups) {
                ordering_barrier_arrive(warpgroup, tiles.warpgroups);
            }
            let seen = view(
                &tile_position,
                rows,
                next,
                0u32,
                masking,
                tiles.keys,
                tiles.keys,
                kind,
            );
            let hides =
                first_row_hides::<F, NB>(&scoring.bias, tile, next, seen.whole, tiles, kind);
            if comptime!(!tiles.orders_warpgroups) {
                biases = biases_of::<F, NB>(
                    scoring,
                    rows,
                    next,
                    count + 1u32,
                    places,
                    thread,
                    tiles,
                    kind,
                );
            }
            let s = take_scores::<NS>(
                started,
                places.key_empty + 8u32 * next_slot.stage,
                elected,
                1usize,
                tiles,
            );
            let s = score::<F, NB, NS>(
                s,
                next * comptime!(tiles.keys as i32),
                &seen,
                rows,
                biases,
                scoring,
                tiles.keys,
                kind.fragment,
            );
            let made = softmax::<NS>(s, running, power, negative_infinity, tiles);
            o = take_output::<NO, NP>(o, p, places.value_empty + 8u32 * slot.stage, elected, tiles);
            // Rounded before, P' needs registers beside P, and where there is a branch behind, ptxas then waits after every
            // product (C7513).
            p = packed::<NS, NP>(made.numerators, tiles);
            if comptime!(kind.leaves_masked()) {
                masked_count += u32::cast_from(may_have_masked);
                may_have_masked = may_have_masked_in(&seen, hides, kind);
                if may_have_masked {
                    tell_used_by(places, p, masked_count, elected, tiles);
                }
            }
            running = made.softmax_state;
            block = next;
            count += 1u32;
            next = next_block(tile, block + 1i32, masking, kind);
        }
        let slot = pipeline_state(count, tiles.stages);
        o = rescale::<NO>(
            o,
            running.moved,
            running.factor,
            comptime!(tiles.value_columns()),
        );
        zero_fill_values(
            places,
            tile,
            &masking.extent,
            block,
            slot,
            may_have_masked,
            masked_count,
            true,
            tiles,
            kind,
        );
        let value_block = uniform(value_operand + slot.stage * value_stage);
        barrier_wait(places.value_full + 8u32 * slot.stage, slot.parity);
        o = multiply_output::<NO, NP>(o, p, value_block, comptime!(tiles.output_product()));
        o = take_output::<NO, NP>(o, p, places.value_empty + 8u32 * slot.stage, elected, tiles);
        softmax_state = running;
        count += 1u32;
        masked = masked_count + u32::cast_from(may_have_masked);
    }

    Attended::<NO> {
        finished: Finished::<NO> {
            o,
            reference: softmax_state.row_max.reference,
            sums: totals(softmax_state.sums),
        },
        visited: Visited {
            blocks: count,
            masked,
        },
    }
}
