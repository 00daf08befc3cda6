//! The forward on Hopper for values up to 256 wide: each warpgroup has 64 queries and all columns of their
//! output.
//!
//! Budget. Shared memory ([`RowTiles::shared_memory`]): the queries, and a ring of `stages` blocks of keys
//! and of values. Registers a thread, at head size 256: 128 of O, 40 of S, 20 of P, and 20 of the next P
//! while S becomes it; `setmaxnreg` takes them from the warpgroup that only fetches. A block of `keys` keys
//! takes the tensor cores `rows · keys · (head_dim + value_dim) / 2048` clocks, and the shared memory a
//! little less (P stays in registers): the matrix unit bounds head sizes from 128 on, the exponentials 64.
//!
//! Schedule. One thread of the fetching warpgroup keeps the ring full; everybody else, block by block:
//! issue `S' = Q K'ᵀ` of the next block; rescale O; issue `O += P V`; wait for S'; make P' of it while the
//! matrix unit is at `P V`; wait for O. A stage is free when a lane of each warp has said so.

use super::fragment::{
    Pair, finite, follow, maxima, normalise, numerators, rescale, score, totals, write_logsumexp,
    write_row,
};
use super::tile::{
    HopperKind, Steps, Tile, clear_unseen_values, copied_rows, forget_used, has_holes,
    has_strangers, load_subtiles, next_block, row_pair, store_boxes, tell_used, tile, used_words,
};
use crate::kernel::engine::wgmma::{
    descriptor, multiply_output, multiply_scores, take_output, take_scores, transposed_descriptor,
};
use crate::kernel::ptx::{
    barrier_expect, barrier_expect_bytes, barrier_init, barrier_init_fence, barrier_wait,
    give_registers, named_barrier, shared_address, store_shared, take_registers,
};
use crate::kernel::schedule::{Grid, share};
use crate::kernel::score::ScoreArguments;
use crate::kernel::visibility::{Extent, is_whole as sees_whole, sight};
use crate::plan::wgmma::{PRODUCT_ROWS, ROW_BYTES, RowTiles, WARPGROUP, is_whole};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Where things are in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Places {
    queries: u32,
    keys: u32,
    values: u32,
    /// Full and empty barriers of the stages of keys, of values, and the queries'.
    key_full: u32,
    key_empty: u32,
    value_full: u32,
    value_empty: u32,
    queries_full: u32,
    used: u32,
}

#[cube]
fn places(start: u32, #[comptime] tiles: RowTiles) -> Places {
    let barriers = start + comptime!(tiles.barriers_at() as u32);
    let each = comptime!(8 * tiles.stages as u32);
    Places {
        queries: start,
        keys: start + comptime!(tiles.keys_at() as u32),
        values: start + comptime!(tiles.values_at() as u32),
        key_full: barriers,
        key_empty: barriers + each,
        value_full: barriers + 2u32 * each,
        value_empty: barriers + 3u32 * each,
        queries_full: barriers + 4u32 * each,
        used: start + comptime!(tiles.used_at() as u32),
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_by_rows<
    E: Float,
    O: Float,
    M: Numeric,
    F: Float,
    K: Float,
    N: Size,
    NS: Size,
    NP: Size,
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
    #[comptime] tiles: RowTiles,
    #[comptime] kind: HopperKind,
    #[define(E)] _element: ElemType,
    #[define(O)] _output_element: ElemType,
    #[define(M)] _mask_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(K)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NS, NP, NO)] _fragments: [usize; 3],
) {
    let index = CUBE_POS as u32;
    if index >= grid.cubes {
        terminate!();
    }
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let places = places(shared_address(&memory), tiles);
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
        comptime!(tiles.rows()),
        tiles.keys,
        kind,
    );
    let first = next_block(&tile, tile.first_block, &extent, &integers, structure);

    if UNIT_POS >= comptime!(consumers as u32) {
        give_registers(comptime!(tiles.thread_registers()[0]));
        if UNIT_POS == comptime!(consumers as u32) {
            fetch(
                query, key, value, &integers, &extent, &steps, &places, &tile, first, tiles, kind,
            );
        }
    } else {
        take_registers(comptime!(tiles.thread_registers()[1]));
        let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
        let lane = UNIT_POS % 32u32;
        let elected = u32::cast_from(lane == 0u32);
        // The row of the thread's first register, in the tile.
        let row = (UNIT_POS / 32u32 * 16u32 + lane / 4u32) as i32;
        let rows = row_pair(&tile, &extent, row, kind);
        let negative_infinity = arguments.negative_infinity;

        let query_operand =
            descriptor(places.queries + warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32));
        let key_operand = descriptor(places.keys);
        let value_operand = transposed_descriptor(places.values, comptime!(tiles.keys * ROW_BYTES));
        let key_stage = comptime!((tiles.key_bytes() >> 4) as u32);
        let value_stage = comptime!((tiles.value_bytes() >> 4) as u32);

        let mut o = Vector::<f32, NO>::zeroed();
        let mut reference_0 = negative_infinity;
        let mut reference_1 = negative_infinity;
        let mut sum_0 = 0.0f32;
        let mut sum_1 = 0.0f32;
        if first < tile.end_block {
            barrier_wait(places.queries_full, 0u32);
            let mut block = first;
            let mut count = 0u32;
            let started =
                multiply_scores::<NS>(query_operand, key_operand, places.key_full, 0u32, tiles);
            let s = take_scores::<NS>(started, places.key_empty, elected, 0usize, tiles);
            let s = score::<M, F, NS>(
                s,
                block * comptime!(tiles.keys as i32),
                sees_all(&tile, block, tiles, kind),
                &rows,
                &mask,
                &bias,
                &integers,
                &sight,
                &extent,
                &arguments,
                tiles.keys,
                kind.fragment,
            );
            let made = softmax::<NS, NP>(
                s,
                pair(reference_0, reference_1),
                pair(sum_0, sum_1),
                power,
                negative_infinity,
                tiles,
                kind,
            );
            reference_0 = made.reference.first;
            reference_1 = made.reference.second;
            sum_0 = made.sums.first;
            sum_1 = made.sums.second;
            let mut factor_0 = f32::new(1.0);
            let mut factor_1 = f32::new(1.0);
            let mut p = made.p;
            if comptime!(kind.leaves_holes()) {
                tell_used(places.used, made.used, 0u32, count);
            }

            let mut next = next_block(&tile, block + 1i32, &extent, &integers, structure);
            while next < tile.end_block {
                let turn = stage_turn(count, tiles);
                let next_turn = stage_turn(count + 1u32, tiles);
                let started = multiply_scores::<NS>(
                    query_operand,
                    key_operand + u64::cast_from(next_turn.stage * key_stage),
                    places.key_full + 8u32 * next_turn.stage,
                    next_turn.parity,
                    tiles,
                );
                o = rescale::<NO>(
                    o,
                    pair(factor_0, factor_1),
                    comptime!(tiles.value_columns()),
                );
                clean_values(&places, &tile, &extent, block, count, turn, tiles, kind);
                o = multiply_output::<NO, NP>(
                    o,
                    p,
                    value_operand + u64::cast_from(turn.stage * value_stage),
                    places.value_full + 8u32 * turn.stage,
                    turn.parity,
                    tiles,
                );
                let s = take_scores::<NS>(
                    started,
                    places.key_empty + 8u32 * next_turn.stage,
                    elected,
                    1usize,
                    tiles,
                );
                let s = score::<M, F, NS>(
                    s,
                    next * comptime!(tiles.keys as i32),
                    sees_all(&tile, next, tiles, kind),
                    &rows,
                    &mask,
                    &bias,
                    &integers,
                    &sight,
                    &extent,
                    &arguments,
                    tiles.keys,
                    kind.fragment,
                );
                let made = softmax::<NS, NP>(
                    s,
                    pair(reference_0, reference_1),
                    pair(sum_0, sum_1),
                    power,
                    negative_infinity,
                    tiles,
                    kind,
                );
                if comptime!(kind.leaves_holes()) {
                    tell_used(places.used, made.used, 0u32, count + 1u32);
                }
                o = take_output::<NO, NP>(
                    o,
                    p,
                    places.value_empty + 8u32 * turn.stage,
                    elected,
                    tiles,
                );
                reference_0 = made.reference.first;
                reference_1 = made.reference.second;
                factor_0 = made.factor.first;
                factor_1 = made.factor.second;
                sum_0 = made.sums.first;
                sum_1 = made.sums.second;
                p = made.p;
                block = next;
                count += 1u32;
                next = next_block(&tile, block + 1i32, &extent, &integers, structure);
            }
            let turn = stage_turn(count, tiles);
            o = rescale::<NO>(
                o,
                pair(factor_0, factor_1),
                comptime!(tiles.value_columns()),
            );
            clean_values(&places, &tile, &extent, block, count, turn, tiles, kind);
            o = multiply_output::<NO, NP>(
                o,
                p,
                value_operand + u64::cast_from(turn.stage * value_stage),
                places.value_full + 8u32 * turn.stage,
                turn.parity,
                tiles,
            );
            o = take_output::<NO, NP>(o, p, places.value_empty + 8u32 * turn.stage, elected, tiles);
        }

        let sums = totals(pair(sum_0, sum_1));
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
        if comptime!(kind.boxes_output) {
            store_boxes::<NO>(
                o,
                pair(first_row.factor, second_row.factor),
                places.queries + warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32),
                tensor_map_address(output_boxes),
                tile.batch,
                tile.first_head,
                tile.first_query + (warpgroup * comptime!(PRODUCT_ROWS as u32)) as i32,
                0u32,
                comptime!(tiles.value_columns()),
                comptime!(tiles.rows() * ROW_BYTES),
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
                0u32,
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
                0u32,
                comptime!(tiles.value_columns()),
                tiles.value_dim,
            );
        }
    }
}

/// A stage of the ring, and the parity of its phase.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Turn {
    stage: u32,
    parity: u32,
}

/// Where the `count`-th visited block is.
#[cube]
fn stage_turn(count: u32, #[comptime] tiles: RowTiles) -> Turn {
    let stages = comptime!(tiles.stages as u32);
    Turn {
        stage: count % stages,
        parity: count / stages % 2u32,
    }
}

/// Copies the queries, and then keys and values of every visited block in the order of their use.
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
    #[comptime] tiles: RowTiles,
    #[comptime] kind: HopperKind,
) {
    let query_map = tensor_map_address(query);
    let key_map = tensor_map_address(key);
    let value_map = tensor_map_address(value);
    barrier_expect_bytes(
        places.queries_full,
        copied_rows(tile, comptime!(tiles.rows()), kind)
            * comptime!((tiles.key_subtiles() * ROW_BYTES) as u32),
    );
    load_subtiles(
        places.queries,
        query_map,
        tile.batch * steps.query_batch,
        tile.first_head,
        tile.first_query,
        places.queries_full,
        0usize,
        comptime!(tiles.key_subtiles()),
        comptime!(tiles.rows() * ROW_BYTES),
        comptime!(kind.heads == 1 && is_whole(tiles.head_dim)),
    );
    let key_batch = tile.batch * steps.key_batch;
    let key_head = tile.kv_head * steps.key_head;
    let mut block = first;
    let mut previous = first;
    let mut count = 0u32;
    while block < tile.end_block {
        let turn = stage_turn(count, tiles);
        let full = places.key_full + 8u32 * turn.stage;
        barrier_wait(places.key_empty + 8u32 * turn.stage, turn.parity ^ 1u32);
        barrier_expect(full, comptime!(tiles.key_bytes()));
        load_subtiles(
            places.keys + turn.stage * comptime!(tiles.key_bytes() as u32),
            key_map,
            key_batch,
            key_head,
            block * comptime!(tiles.keys as i32),
            full,
            0usize,
            comptime!(tiles.key_subtiles()),
            comptime!(tiles.keys * ROW_BYTES),
            comptime!(is_whole(tiles.head_dim)),
        );
        if count > 0u32 {
            fetch_values(
                value_map,
                steps,
                places,
                tile,
                previous,
                count - 1u32,
                tiles,
            );
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
        fetch_values(
            value_map,
            steps,
            places,
            tile,
            previous,
            count - 1u32,
            tiles,
        );
    }
}

/// Copies the values of the `count`-th visited block.
#[cube]
fn fetch_values(
    map: u64,
    steps: &Steps,
    places: &Places,
    tile: &Tile,
    block: i32,
    count: u32,
    #[comptime] tiles: RowTiles,
) {
    let turn = stage_turn(count, tiles);
    let full = places.value_full + 8u32 * turn.stage;
    barrier_wait(places.value_empty + 8u32 * turn.stage, turn.parity ^ 1u32);
    barrier_expect(full, comptime!(tiles.value_bytes()));
    load_subtiles(
        places.values + turn.stage * comptime!(tiles.value_bytes() as u32),
        map,
        tile.batch * steps.value_batch,
        tile.kv_head * steps.value_head,
        block * comptime!(tiles.keys as i32),
        full,
        0usize,
        comptime!(tiles.value_subtiles()),
        comptime!(tiles.keys * ROW_BYTES),
        comptime!(is_whole(tiles.value_dim)),
    );
}

/// Whether every query of the tile sees every key of the block.
#[cube]
fn sees_all(
    tile: &Tile,
    block: i32,
    #[comptime] tiles: RowTiles,
    #[comptime] kind: HopperKind,
) -> bool {
    let size = comptime!(tiles.keys as i32);
    sees_whole(&tile.keys, block * size, size, kind.fragment.structure)
}

#[cube]
fn pair(first: f32, second: f32) -> Pair {
    Pair { first, second }
}

/// P of a block, and what it makes of the rows' statistics.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Step<NP: Size> {
    p: Vector<u32, NP>,
    reference: Pair,
    sums: Pair,
    /// On older results; the sums have it already.
    factor: Pair,
    used: u32,
}

#[cube]
fn softmax<NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    reference: Pair,
    sums: Pair,
    power: f32,
    negative_infinity: f32,
    #[comptime] tiles: RowTiles,
    #[comptime] kind: HopperKind,
) -> Step<NP> {
    let largest = maxima::<NS>(s, reference, tiles.keys);
    let moved = follow(reference, largest, power, negative_infinity);
    let shift = Pair {
        first: finite(moved.reference.first, negative_infinity) * power,
        second: finite(moved.reference.second, negative_infinity) * power,
    };
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    let mut used = 0u32;
    let mut p = Vector::<u32, NP>::zeroed();
    #[unroll]
    for step in 0..comptime!(tiles.keys / 16) {
        let made = numerators::<NS>(
            s,
            shift,
            power,
            step,
            tiles.half,
            comptime!(kind.leaves_holes()),
        );
        p.insert(comptime!(4 * step), made.p_0);
        p.insert(comptime!(4 * step + 1), made.p_1);
        p.insert(comptime!(4 * step + 2), made.p_2);
        p.insert(comptime!(4 * step + 3), made.p_3);
        sum_0 += made.sums.first;
        sum_1 += made.sums.second;
        used |= made.used;
    }
    Step::<NP> {
        p,
        reference: moved.reference,
        sums: Pair {
            first: sums.first * moved.factor.first + sum_0,
            second: sums.second * moved.factor.second + sum_1,
        },
        factor: moved.factor,
        used,
    }
}

/// Before the `count`-th visited block's values are multiplied: zeros in place of those that nobody in the
/// tile sees.
#[cube]
fn clean_values(
    places: &Places,
    tile: &Tile,
    extent: &Extent,
    block: i32,
    count: u32,
    turn: Turn,
    #[comptime] tiles: RowTiles,
    #[comptime] kind: HopperKind,
) {
    let units = comptime!(tiles.warpgroups * WARPGROUP);
    let first_key = block * comptime!(tiles.keys as i32);
    let words = used_words(places.used, count);
    let mut dirty = has_strangers(tile, extent, first_key, tiles.keys);
    if comptime!(kind.leaves_holes()) {
        named_barrier(1usize, units);
        dirty = has_holes(words, tiles.keys);
        forget_used(places.used, count);
    }
    if dirty {
        barrier_wait(places.value_full + 8u32 * turn.stage, turn.parity);
        clear_unseen_values(
            places.values + turn.stage * comptime!(tiles.value_bytes() as u32),
            tile,
            first_key,
            words,
            UNIT_POS,
            0usize,
            units,
            tiles.keys,
            comptime!(tiles.value_subtiles()),
            comptime!(kind.leaves_holes()),
        );
        named_barrier(2usize, units);
    }
}
