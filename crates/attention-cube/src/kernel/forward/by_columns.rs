//! The forward on Hopper for values up to 512 wide: two warpgroups have the same 64 queries, and each has
//! half of the columns of their output.
//!
//! Budget. Shared memory ([`ColumnTiles::shared_memory`]), at head size 512: queries 64 KB, a ring of 8 × 16 KB,
//! two buffers of P with 16 KB each, the rows' maxima. Registers a thread: 128 of O, 32 of S. A block of 128
//! keys takes the tensor cores `4 head_dim + 4 value_dim` clocks, and the shared memory about 1.3 times that:
//! both warpgroups read all queries, and P comes from shared memory. That is the bound.
//!
//! Schedule. Keys come in chunks of 64 columns and values in chunks of 32 keys, alternately for either
//! warpgroup, through one ring, `K₀ K₁ V₀ K₂ V₁ …`. Each warpgroup has the scores of 64 of a block's keys;
//! the rows' maxima meet in shared memory, and P goes there for both. Block by block: issue `S' = Q K'ᵀ` of
//! the next; rescale O; issue `O += P V`; wait for S' alone; make P' of it while the matrix unit is at `P V`,
//! freeing the chunks of V on the way; wait for O.

use super::fragment::{
    Pair, finite, follow, maxima, normalise, numerators, rescale, score, totals, write_logsumexp,
    write_row,
};
use super::tile::{
    HopperKind, Steps, Tile, clear_unseen_values, copied_rows, forget_used, has_holes,
    has_strangers, load_subtiles, next_block, row_pair, store_boxes, tell_used, tile, used_words,
    warpgroup_barrier,
};
use crate::kernel::engine::wgmma::{
    Ring, chunk, descriptor, free_chunk, multiply_chunked_output, multiply_chunked_scores,
    take_fragment, transposed_descriptor,
};
use crate::kernel::ptx::{
    async_proxy_fence, barrier_expect, barrier_expect_bytes, barrier_init, barrier_init_fence,
    barrier_wait, give_registers, load_shared, named_barrier, shared_address, store_matrices,
    store_shared, take_registers, tma_prefetch_subtiles,
};
use crate::kernel::schedule::{Grid, share};
use crate::kernel::score::ScoreArguments;
use crate::kernel::visibility::{Extent, is_whole as sees_whole, sight};
use crate::plan::wgmma::{ColumnTiles, PRODUCT_ROWS, ROW_BYTES, SUBTILE, WARPGROUP, is_whole};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Keys of a warpgroup's scores.
const HALF_KEYS: usize = ColumnTiles::KEYS / 2;

/// Threads that multiply.
const CONSUMERS: usize = ColumnTiles::WARPGROUPS * WARPGROUP;

/// Chunks of values of a warpgroup.
const OWN_CHUNKS: usize = ColumnTiles::KEYS / ColumnTiles::VALUE_KEYS;

/// Meetings of both warpgroups: the maxima are there; P is there.
const MAXIMA: usize = 1;
const PROBABILITIES: usize = 2;

/// Where things are in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Places {
    queries: u32,
    stages: u32,
    probabilities: u32,
    exchange: u32,
    full: u32,
    empty: u32,
    queries_full: u32,
    used: u32,
}

#[cube]
fn places(start: u32, #[comptime] tiles: ColumnTiles) -> Places {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let each = comptime!(8 * tiles.stages as u32);
    Places {
        queries: start,
        stages: start + comptime!(tiles.stages_at() as u32),
        probabilities: start + comptime!(tiles.probabilities_at() as u32),
        exchange: start + comptime!(tiles.exchange_at() as u32),
        full: barriers,
        empty: barriers + each,
        queries_full: barriers + 2u32 * each,
        used: start + comptime!(tiles.used_at() as u32),
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_by_columns<
    E: Float,
    O: Float,
    M: Numeric,
    F: Float,
    K: Float,
    N: Size,
    NS: Size,
    NO: Size,
>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    mask: ComptimeOption<&Tensor<M>>,
    bias: ComptimeOption<&Tensor<F>>,
    integers: ComptimeOption<&Tensor<i32>>,
    sinks: ComptimeOption<&Tensor<K>>,
    output_boxes: &TensorMap<E, Tiled>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    grid: Grid,
    extent: Extent,
    arguments: ScoreArguments,
    steps: Steps,
    group: u32,
    power: f32,
    #[comptime] tiles: ColumnTiles,
    #[comptime] kind: HopperKind,
    #[define(E)] _element: ElemType,
    #[define(O)] _output_element: ElemType,
    #[define(M)] _mask_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(K)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NS, NO)] _fragments: [usize; 2],
) {
    let index = CUBE_POS as u32;
    if index >= grid.cubes {
        terminate!();
    }
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let places = places(shared_address(&memory), tiles);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(places.full + at, 1usize);
            // A warp of either warpgroup arrives once at a chunk of keys, a warp of one twice at one of values.
            barrier_init(places.empty + at, 8usize);
        }
        barrier_init(places.queries_full, 1usize);
        barrier_init_fence();
        if comptime!(kind.leaves_holes()) {
            #[unroll]
            for word in 0..12usize {
                store_shared(places.used + comptime!(4 * word as u32), 0u32);
            }
        }
    }
    sync_cube();

    let structure = comptime!(kind.fragment.structure);
    let share = share(&grid, index, true);
    let sight = sight(&extent, &integers, share.batch, structure);
    let tile = tile(
        share,
        &grid,
        &extent,
        &sight,
        group,
        ColumnTiles::ROWS,
        ColumnTiles::KEYS,
        kind,
    );
    let first = next_block(&tile, tile.first_block, &extent, &integers, structure);

    if UNIT_POS >= comptime!(CONSUMERS as u32) {
        give_registers(24usize);
        if UNIT_POS == comptime!(CONSUMERS as u32) {
            fetch(
                query, key, value, &integers, &extent, &steps, &places, &tile, first, tiles, kind,
            );
        }
    } else {
        take_registers(240usize);
        let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
        let lane = UNIT_POS % 32u32;
        // The row of the thread's first register, in the tile.
        let row = (UNIT_POS / 32u32 % 4u32 * 16u32 + lane / 4u32) as i32;
        let rows = row_pair(&tile, &extent, row, kind);
        let negative_infinity = arguments.negative_infinity;
        let ring = Ring {
            full: places.full,
            empty: places.empty,
            elected: u32::cast_from(lane == 0u32),
        };

        let query_operand = descriptor(places.queries);
        let key_operand =
            descriptor(places.stages + warpgroup * comptime!(ColumnTiles::HALF_BYTES as u32));
        let value_operand = transposed_descriptor(
            places.stages,
            comptime!(ColumnTiles::VALUE_KEYS * ROW_BYTES),
        );

        let mut o = Vector::<f32, NO>::zeroed();
        let mut reference_0 = negative_infinity;
        let mut reference_1 = negative_infinity;
        let mut sum_0 = 0.0f32;
        let mut sum_1 = 0.0f32;
        if first < tile.end_block {
            barrier_wait(places.queries_full, 0u32);
            let mut block = first;
            let mut count = 0u32;
            // Chunks that went through the ring.
            let mut passed = u32::new(comptime!(tiles.key_chunks() as i64));
            let started = multiply_chunked_scores::<NS>(
                query_operand,
                key_operand,
                ring,
                chunk(0u32, tiles.stages),
                tiles,
            );
            let s = take_fragment::<NS>(started, HALF_KEYS / 2, HALF_KEYS / 2, 0usize);
            free_chunk(
                places.empty + 8u32 * chunk(passed - 1u32, tiles.stages).stage,
                ring.elected,
                0usize,
                1usize,
            );
            let s = score::<M, F, NS>(
                s,
                block * comptime!(ColumnTiles::KEYS as i32)
                    + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
                sees_all(&tile, block, kind),
                &rows,
                &mask,
                &bias,
                &integers,
                &sight,
                &extent,
                &arguments,
                HALF_KEYS,
                kind.fragment,
            );
            let made = softmax::<NS>(
                s,
                pair(reference_0, reference_1),
                pair(sum_0, sum_1),
                power,
                negative_infinity,
                &places,
                ring,
                0u32,
                count,
                false,
                tiles,
                kind,
            );
            reference_0 = made.reference.first;
            reference_1 = made.reference.second;
            sum_0 = made.sums.first;
            sum_1 = made.sums.second;
            let mut factor_0 = f32::new(1.0);
            let mut factor_1 = f32::new(1.0);

            let mut next = next_block(&tile, block + 1i32, &extent, &integers, structure);
            while next < tile.end_block {
                let started = multiply_chunked_scores::<NS>(
                    query_operand,
                    key_operand,
                    ring,
                    chunk(passed, tiles.stages),
                    tiles,
                );
                passed += comptime!(tiles.key_chunks() as u32);
                let key_empty = places.empty + 8u32 * chunk(passed - 1u32, tiles.stages).stage;
                o = rescale::<NO>(
                    o,
                    pair(factor_0, factor_1),
                    comptime!(tiles.value_columns()),
                );
                named_barrier(PROBABILITIES, CONSUMERS);
                let cleaned = clean_values(
                    &places, &tile, &extent, block, count, passed, key_empty, ring, tiles, kind,
                );
                o = multiply_chunked_output::<NO>(
                    o,
                    probabilities(&places, count),
                    value_operand,
                    ring,
                    chunk(passed + warpgroup, tiles.stages),
                    key_empty,
                    select(cleaned, 0u32, ring.elected),
                    tiles,
                );
                let s = take_fragment::<NS>(started, HALF_KEYS / 2, HALF_KEYS / 2, OWN_CHUNKS);
                let s = score::<M, F, NS>(
                    s,
                    next * comptime!(ColumnTiles::KEYS as i32)
                        + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
                    sees_all(&tile, next, kind),
                    &rows,
                    &mask,
                    &bias,
                    &integers,
                    &sight,
                    &extent,
                    &arguments,
                    HALF_KEYS,
                    kind.fragment,
                );
                let made = softmax::<NS>(
                    s,
                    pair(reference_0, reference_1),
                    pair(sum_0, sum_1),
                    power,
                    negative_infinity,
                    &places,
                    ring,
                    passed + warpgroup,
                    count + 1u32,
                    true,
                    tiles,
                    kind,
                );
                o = take_fragment::<NO>(
                    o,
                    comptime!(tiles.value_columns() / 2),
                    comptime!(tiles.output_fragment()),
                    0usize,
                );
                free_values(
                    places.empty,
                    ring,
                    passed + warpgroup,
                    3usize,
                    0usize,
                    tiles,
                );
                passed += comptime!(tiles.value_chunks() as u32);
                reference_0 = made.reference.first;
                reference_1 = made.reference.second;
                factor_0 = made.factor.first;
                factor_1 = made.factor.second;
                sum_0 = made.sums.first;
                sum_1 = made.sums.second;
                block = next;
                count += 1u32;
                next = next_block(&tile, block + 1i32, &extent, &integers, structure);
            }
            o = rescale::<NO>(
                o,
                pair(factor_0, factor_1),
                comptime!(tiles.value_columns()),
            );
            named_barrier(PROBABILITIES, CONSUMERS);
            clean_values(
                &places,
                &tile,
                &extent,
                block,
                count,
                passed,
                places.empty,
                Ring {
                    full: ring.full,
                    empty: ring.empty,
                    elected: 0u32,
                },
                tiles,
                kind,
            );
            o = multiply_chunked_output::<NO>(
                o,
                probabilities(&places, count),
                value_operand,
                ring,
                chunk(passed + warpgroup, tiles.stages),
                places.empty,
                0u32,
                tiles,
            );
            o = take_fragment::<NO>(
                o,
                comptime!(tiles.value_columns() / 2),
                comptime!(tiles.output_fragment()),
                0usize,
            );
        }

        // Each warpgroup has summed over its own keys.
        let sums = totals(pair(sum_0, sum_1));
        named_barrier(MAXIMA, CONSUMERS);
        let sums = exchange(&places, sums, 0u32, false);
        let exists_0 = row < tile.rows;
        let exists_1 = row + 8i32 < tile.rows;
        let first_row = normalise::<K>(
            reference_0,
            sums.first,
            power,
            rows.head_0,
            exists_0,
            &sinks,
            negative_infinity,
        );
        let second_row = normalise::<K>(
            reference_1,
            sums.second,
            power,
            rows.head_1,
            exists_1,
            &sinks,
            negative_infinity,
        );
        let first_column = warpgroup * comptime!(tiles.value_columns() as u32);
        if warpgroup == 0u32 {
            write_logsumexp(
                logsumexp,
                first_row,
                tile.part,
                rows.head_0,
                rows.query_0,
                exists_0,
            );
            write_logsumexp(
                logsumexp,
                second_row,
                tile.part,
                rows.head_1,
                rows.query_1,
                exists_1,
            );
        }
        if comptime!(kind.boxes_output) {
            // Both warpgroups are done with every stage since they exchanged the sums.
            let bytes = comptime!((tiles.value_subtiles() * PRODUCT_ROWS * ROW_BYTES) as u32);
            store_boxes::<NO>(
                o,
                pair(first_row.factor, second_row.factor),
                places.stages + warpgroup * bytes,
                tensor_map_address(output_boxes),
                tile.batch,
                tile.first_head,
                tile.first_query,
                first_column,
                comptime!(tiles.value_columns()),
                comptime!(PRODUCT_ROWS * ROW_BYTES),
                tiles.half,
            );
        } else {
            write_row::<O, N, NO>(
                o,
                first_row,
                output,
                tile.part,
                rows.head_0,
                rows.query_0,
                exists_0,
                0usize,
                first_column,
                comptime!(tiles.value_columns()),
                tiles.value_dim,
            );
            write_row::<O, N, NO>(
                o,
                second_row,
                output,
                tile.part,
                rows.head_1,
                rows.query_1,
                exists_1,
                1usize,
                first_column,
                comptime!(tiles.value_columns()),
                tiles.value_dim,
            );
        }
    }
}

/// P of the `count`-th visited block.
#[cube]
fn probabilities(places: &Places, count: u32) -> u64 {
    descriptor(places.probabilities + count % 2u32 * comptime!(2 * ColumnTiles::HALF_BYTES as u32))
}

/// Once at most `pending` products are in flight, frees the warpgroup's `own`-th chunk of values from chunk
/// `from` on.
#[cube]
fn free_values(
    empty: u32,
    ring: Ring,
    from: u32,
    #[comptime] own: usize,
    #[comptime] pending: usize,
    #[comptime] tiles: ColumnTiles,
) {
    let chunk = chunk(
        from + comptime!((ColumnTiles::WARPGROUPS * own) as u32),
        tiles.stages,
    );
    free_chunk(
        empty + 8u32 * chunk.stage,
        ring.elected,
        pending,
        ColumnTiles::WARPGROUPS,
    );
}

/// Copies the queries, and then the chunks of keys and values of every visited block in the order of their use.
#[cube]
fn fetch<E: Float>(
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    integers: &ComptimeOption<&Tensor<i32>>,
    extent: &Extent,
    steps: &Steps,
    places: &Places,
    tile: &Tile,
    first: i32,
    #[comptime] tiles: ColumnTiles,
    #[comptime] kind: HopperKind,
) {
    let query_map = tensor_map_address(query);
    let key_map = tensor_map_address(key);
    let value_map = tensor_map_address(value);
    barrier_expect_bytes(
        places.queries_full,
        copied_rows(tile, ColumnTiles::ROWS, kind)
            * comptime!((tiles.key_chunks() * ROW_BYTES) as u32),
    );
    load_subtiles(
        places.queries,
        query_map,
        tile.batch * steps.query_batch,
        tile.first_head,
        tile.first_query,
        places.queries_full,
        0usize,
        comptime!(tiles.key_chunks()),
        comptime!(PRODUCT_ROWS * ROW_BYTES),
        comptime!(kind.heads == 1 && is_whole(tiles.head_dim)),
    );
    let key_batch = tile.batch * steps.key_batch;
    let key_head = tile.kv_head * steps.key_head;
    let mut block = first;
    let mut previous = first;
    let mut count = 0u32;
    let mut passed = 0u32;
    while block < tile.end_block {
        if block + 1i32 < tile.end_block {
            prefetch(key_map, value_map, steps, tile, block + 1i32, tiles);
        }
        #[unroll]
        for part in 0..comptime!(tiles.key_chunks()) {
            let place = next_stage(places, passed + comptime!(part as u32), tiles);
            barrier_expect(place.full, ColumnTiles::STAGE_BYTES);
            load_subtiles(
                place.at,
                key_map,
                key_batch,
                key_head,
                block * comptime!(ColumnTiles::KEYS as i32),
                place.full,
                comptime!(part * SUBTILE),
                1usize,
                ColumnTiles::STAGE_BYTES,
                comptime!(is_whole(tiles.head_dim)),
            );
        }
        passed += comptime!(tiles.key_chunks() as u32);
        if count > 0u32 {
            fetch_values(value_map, steps, places, tile, previous, passed, tiles);
            passed += comptime!(tiles.value_chunks() as u32);
        }
        previous = block;
        block = next_block(
            tile,
            block + 1i32,
            extent,
            integers,
            kind.fragment.structure,
        );
        count += 1u32;
    }
    if count > 0u32 {
        fetch_values(value_map, steps, places, tile, previous, passed, tiles);
    }
}

/// Asks for a chunk of keys and one of values of a block that is needed soon. The cubes whose tiles are
/// neighbours read the same keys at about the same time, so each asks for another chunk.
#[cube]
fn prefetch(
    key_map: u64,
    value_map: u64,
    steps: &Steps,
    tile: &Tile,
    block: i32,
    #[comptime] tiles: ColumnTiles,
) {
    let row = block * comptime!(ColumnTiles::KEYS as i32);
    let turn = tile.first_query as u32 / comptime!(ColumnTiles::ROWS as u32);
    if comptime!(is_whole(tiles.head_dim)) {
        tma_prefetch_subtiles(
            key_map,
            tile.batch * steps.key_batch,
            tile.kv_head * steps.key_head,
            row,
            turn % comptime!(tiles.key_chunks() as u32),
        );
    }
    if comptime!(tiles.has_whole_values()) {
        let part = turn % comptime!(tiles.value_chunks() as u32);
        let warpgroups = comptime!(ColumnTiles::WARPGROUPS as u32);
        tma_prefetch_subtiles(
            value_map,
            tile.batch * steps.value_batch,
            tile.kv_head * steps.value_head,
            row + (part / warpgroups * comptime!(ColumnTiles::VALUE_KEYS as u32)) as i32,
            part % warpgroups * comptime!(tiles.value_subtiles() as u32),
        );
    }
}

/// A free stage.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct FreeStage {
    at: u32,
    full: u32,
}

/// Waits for the stage of the `index`-th chunk.
#[cube]
fn next_stage(places: &Places, index: u32, #[comptime] tiles: ColumnTiles) -> FreeStage {
    let chunk = chunk(index, tiles.stages);
    barrier_wait(places.empty + 8u32 * chunk.stage, chunk.parity ^ 1u32);
    FreeStage {
        at: places.stages + chunk.stage * comptime!(ColumnTiles::STAGE_BYTES as u32),
        full: places.full + 8u32 * chunk.stage,
    }
}

/// Copies the values of a block, whose first chunk is `passed`.
#[cube]
fn fetch_values(
    map: u64,
    steps: &Steps,
    places: &Places,
    tile: &Tile,
    block: i32,
    passed: u32,
    #[comptime] tiles: ColumnTiles,
) {
    let batch = tile.batch * steps.value_batch;
    let head = tile.kv_head * steps.value_head;
    #[unroll]
    for part in 0..comptime!(tiles.value_chunks()) {
        let place = next_stage(places, passed + comptime!(part as u32), tiles);
        barrier_expect(place.full, comptime!(tiles.value_bytes()));
        let first_column = comptime!(part % ColumnTiles::WARPGROUPS * tiles.value_columns());
        let first_row =
            comptime!((part / ColumnTiles::WARPGROUPS * ColumnTiles::VALUE_KEYS) as i32);
        load_subtiles(
            place.at,
            map,
            batch,
            head,
            block * comptime!(ColumnTiles::KEYS as i32) + first_row,
            place.full,
            first_column,
            comptime!(tiles.value_subtiles()),
            comptime!(ColumnTiles::VALUE_KEYS * ROW_BYTES),
            comptime!(tiles.has_whole_values()),
        );
    }
}

/// Whether every query of the tile sees every key of the block.
#[cube]
fn sees_all(tile: &Tile, block: i32, #[comptime] kind: HopperKind) -> bool {
    let size = comptime!(ColumnTiles::KEYS as i32);
    sees_whole(&tile.keys, block * size, size, kind.fragment.structure)
}

#[cube]
fn pair(first: f32, second: f32) -> Pair {
    Pair { first, second }
}

/// The sum, or with `largest` the maximum, of both warpgroups' numbers of the thread's rows. The caller sees
/// to it that the last exchange through this buffer is over.
#[cube]
fn exchange(places: &Places, own: Pair, buffer: u32, #[comptime] largest: bool) -> Pair {
    let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
    let lane = UNIT_POS % 32u32;
    let row = UNIT_POS / 32u32 % 4u32 * 16u32 + lane / 4u32;
    let of_warpgroup = comptime!(4 * ColumnTiles::ROWS as u32);
    let start = places.exchange + buffer * 2u32 * of_warpgroup + 4u32 * row;
    let column = lane % 4u32;
    if column == 0u32 {
        let mine = start + warpgroup * of_warpgroup;
        store_shared(mine, u32::reinterpret(own.first));
        store_shared(mine + 32u32, u32::reinterpret(own.second));
    }
    named_barrier(MAXIMA, CONSUMERS);
    let other = start + (1u32 - warpgroup) * of_warpgroup;
    let first = f32::reinterpret(load_shared(other));
    let second = f32::reinterpret(load_shared(other + 32u32));
    if comptime!(largest) {
        Pair {
            first: max(own.first, first),
            second: max(own.second, second),
        }
    } else {
        Pair {
            first: own.first + first,
            second: own.second + second,
        }
    }
}

/// What a block makes of the rows' statistics.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Step {
    reference: Pair,
    sums: Pair,
    /// On older results; the sums have it already.
    factor: Pair,
}

/// Makes the warpgroup's half of P of the `count`-th visited block in shared memory. While the matrix unit is
/// `busy` with the values from chunk `values` on, frees these on the way.
#[cube]
fn softmax<NS: Size>(
    s: Vector<f32, NS>,
    reference: Pair,
    sums: Pair,
    power: f32,
    negative_infinity: f32,
    places: &Places,
    ring: Ring,
    values: u32,
    count: u32,
    #[comptime] busy: bool,
    #[comptime] tiles: ColumnTiles,
    #[comptime] kind: HopperKind,
) -> Step {
    let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
    let lane = UNIT_POS % 32u32;
    let own = maxima::<NS>(s, reference, HALF_KEYS);
    let largest = exchange(places, own, count % 2u32, true);
    if comptime!(busy && !tiles.frees_first_chunk_at_once()) {
        free_values(places.empty, ring, values, 0usize, 3usize, tiles);
    }
    let moved = follow(reference, largest, power, negative_infinity);
    let shift = Pair {
        first: finite(moved.reference.first, negative_infinity) * power,
        second: finite(moved.reference.second, negative_infinity) * power,
    };
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    let mut used = 0u32;
    let half = places.probabilities
        + (count % 2u32 * 2u32 + warpgroup) * comptime!(ColumnTiles::HALF_BYTES as u32);
    let row = half + (UNIT_POS / 32u32 % 4u32 * 16u32 + lane % 16u32) * comptime!(ROW_BYTES as u32);
    // The 128-byte swizzle: a row's pieces of 16 bytes are permuted by its number.
    let swizzle = ((lane / 16u32) ^ (lane % 8u32)) << 4u32;
    #[unroll]
    for step in 0..comptime!(HALF_KEYS / 16) {
        let made = numerators::<NS>(
            s,
            shift,
            power,
            step,
            tiles.half,
            comptime!(kind.leaves_holes()),
        );
        store_matrices(
            row + (swizzle ^ comptime!(32 * step as u32)),
            made.p_0,
            made.p_1,
            made.p_2,
            made.p_3,
        );
        sum_0 += made.sums.first;
        sum_1 += made.sums.second;
        used |= made.used;
        if comptime!(busy && step == 1) {
            free_values(places.empty, ring, values, 1usize, 2usize, tiles);
        }
    }
    if comptime!(kind.leaves_holes()) {
        tell_used(
            places.used,
            used,
            warpgroup * comptime!((HALF_KEYS / 4) as u32),
            count,
        );
    }
    async_proxy_fence();
    if comptime!(busy) {
        free_values(places.empty, ring, values, 2usize, 1usize, tiles);
    }
    Step {
        reference: moved.reference,
        sums: Pair {
            first: sums.first * moved.factor.first + sum_0,
            second: sums.second * moved.factor.second + sum_1,
        },
        factor: moved.factor,
    }
}

/// Before the `count`-th visited block's values, from chunk `passed` on, are multiplied: zeros in place of
/// those that nobody in the tile sees. Tells whether it waited for S, and freed the last chunk of keys.
#[cube]
fn clean_values(
    places: &Places,
    tile: &Tile,
    extent: &Extent,
    block: i32,
    count: u32,
    passed: u32,
    key_empty: u32,
    ring: Ring,
    #[comptime] tiles: ColumnTiles,
    #[comptime] kind: HopperKind,
) -> bool {
    let first_key = block * comptime!(ColumnTiles::KEYS as i32);
    let words = used_words(places.used, count);
    let mut dirty = has_strangers(tile, extent, first_key, ColumnTiles::KEYS);
    if comptime!(kind.leaves_holes()) {
        dirty = has_holes(words, ColumnTiles::KEYS);
        forget_used(places.used, count);
    }
    if dirty {
        // The last chunk of values may need the stage of the last chunk of keys.
        free_chunk(key_empty, ring.elected, 0usize, 1usize);
        let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
        #[unroll]
        for own in 0..OWN_CHUNKS {
            let chunk = chunk(
                passed + warpgroup + comptime!((ColumnTiles::WARPGROUPS * own) as u32),
                tiles.stages,
            );
            barrier_wait(places.full + 8u32 * chunk.stage, chunk.parity);
            clear_unseen_values(
                places.stages + chunk.stage * comptime!(ColumnTiles::STAGE_BYTES as u32),
                tile,
                first_key,
                words,
                UNIT_POS % comptime!(WARPGROUP as u32),
                comptime!(own * ColumnTiles::VALUE_KEYS),
                WARPGROUP,
                ColumnTiles::VALUE_KEYS,
                comptime!(tiles.value_subtiles()),
                comptime!(kind.leaves_holes()),
            );
        }
        warpgroup_barrier();
    }
    dirty
}
