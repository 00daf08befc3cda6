//! The backward on Hopper for heads up to 256 wide: each warpgroup has 64 rows, of queries or of keys, and all
//! columns of their gradients.
//!
//! Budget. Shared memory ([`GradientRowTiles::shared_memory`]): the dots and values of the tile, a ring of
//! blocks of dots and one of blocks of values. Registers a thread, at head size 256: 128 of the gradient, 32 of
//! S, 32 of dP, 16 of dS. A block takes the tensor cores `rows · columns · head_dim / 2048` clocks a product of
//! dots, and as many a product of values; S and dP read both operands from shared memory, which at 64 columns
//! takes as long as the product.
//!
//! Schedule. One thread of the fetching warpgroup keeps the rings full; everybody else, block by block: issue S
//! and dP; make the weights of S, and P where its product is asked for, which is issued at once; make dS of
//! the weights and dP; issue its product; wait. Warpgroups share nothing but the rings, so that one makes its
//! weights while the other multiplies.

mod producer;

use self::producer::{Places, fetch, places, stage_of};
use super::held::{
    GradientSteps, Held, first_visit, held, held_rows, held_share, standing_of, visit_from,
};
use super::weights::{Terms, dot_gradients, weights};
use crate::kernel::engine::wgmma::{
    descriptor, free_chunk, multiply_output, multiply_scores, take_fragment, take_sums,
    transposed_descriptor,
};
use crate::kernel::forward::fragment::columns_end;
use crate::kernel::forward::fragment::{Pair, pair};
use crate::kernel::forward::output::{await_stores, store_boxes, write_row};
use crate::kernel::forward::tile::{
    HopperKind, clear_unseen, forget_used, has_holes, has_strangers, tell_used, used_columns,
    used_words, view,
};
use crate::kernel::mask_bits::MaskPlaces;
use crate::kernel::ptx::{
    barrier_init, barrier_init_fence, barrier_wait, give_registers, named_barrier, shared_address,
    store_shared, take_registers, uniform,
};
use crate::kernel::schedule::Grid;
use crate::kernel::score::ScoreArguments;
use crate::kernel::visibility::{Extent, Sight, sight};
use crate::plan::wgmma::{GradientRowTiles, PRODUCT_ROWS, ROW_BYTES, Side, WARPGROUP};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Where all warps that multiply meet, before a block is cleaned and after.
const MEETING: usize = 1;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn gradient_by_rows<
    E: Float,
    F: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NP: Size,
    ND: Size,
    NV: Size,
>(
    held_dots: &TensorMap<E, Tiled>,
    held_values: &TensorMap<E, Tiled>,
    dots: &TensorMap<E, Tiled>,
    values: &TensorMap<E, Tiled>,
    term_boxes: &TensorMap<f32, Tiled>,
    terms: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<u32>>,
    bias: ComptimeOption<&Tensor<Vector<F, NB>>>,
    integers: ComptimeOption<&Tensor<i32>>,
    dot_gradient_boxes: &TensorMap<E, Tiled>,
    dot_gradient: &mut Tensor<Vector<E, N>>,
    value_gradient_boxes: &TensorMap<E, Tiled>,
    value_gradient: &mut Tensor<Vector<E, N>>,
    grid: Grid,
    extent: Extent,
    arguments: ScoreArguments,
    steps: GradientSteps,
    mask_places: MaskPlaces,
    group: u32,
    power: f32,
    #[comptime] tiles: GradientRowTiles,
    #[comptime] kind: HopperKind,
    #[define(E)] _element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NP, ND, NV)] _fragments: [usize; 4],
) {
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let places = places(shared_address(&memory), tiles);
    let consumers = comptime!(tiles.warpgroups * WARPGROUP);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.dot_stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(places.dot_full + at, 1usize);
            barrier_init(places.dot_empty + at, comptime!(4 * tiles.warpgroups));
        }
        #[unroll]
        for stage in 0..tiles.value_stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(places.value_full + at, 1usize);
            barrier_init(places.value_empty + at, comptime!(4 * tiles.warpgroups));
        }
        barrier_init(places.held_full, 1usize);
        barrier_init_fence();
        if comptime!(kind.leaves_holes()) {
            #[unroll]
            for word in 0..12usize {
                store_shared(places.used + comptime!(4 * word as u32), 0u32);
            }
        }
    }
    sync_cube();

    let index = CUBE_POS as u32;
    if index < grid.cubes {
        let share = held_share(&grid, index, kind.fragment.side);
        let sight = sight(&extent, &integers, share.batch, kind.fragment.structure);
        let tile = held(
            share,
            &extent,
            &sight,
            group,
            comptime!(tiles.rows()),
            tiles.columns,
            kind,
        );
        if UNIT_POS >= comptime!(consumers as u32) {
            give_registers(comptime!(tiles.thread_registers()[0]));
            if UNIT_POS == comptime!(consumers as u32) {
                fetch(
                    held_dots,
                    held_values,
                    dots,
                    values,
                    term_boxes,
                    &mask,
                    &mask_places,
                    &integers,
                    &tile,
                    &extent,
                    &steps,
                    &places,
                    tiles,
                    kind,
                );
            }
        } else {
            take_registers(comptime!(tiles.thread_registers()[1]));
            let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
            // The row of the thread's first register, in the tile.
            let row = (UNIT_POS / 32u32 * 16u32 + UNIT_POS % 32u32 / 4u32) as i32;
            let sums = sum::<F, NB, NS, NP, ND, NV>(
                &tile,
                &sight,
                row,
                terms,
                &mask,
                &mask_places,
                &bias,
                &integers,
                &extent,
                &arguments,
                &places,
                warpgroup,
                power,
                tiles,
                kind,
            );
            let staging = warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32);
            if comptime!(tiles.sums.has_dots()) {
                write_gradient::<E, N, ND>(
                    sums.dots,
                    arguments.scale,
                    places.held_dots + staging,
                    tensor_map_address(dot_gradient_boxes),
                    dot_gradient,
                    &tile,
                    row,
                    comptime!(tiles.dot_columns()),
                    tiles.head_dim,
                    comptime!(tiles.boxes_dots()),
                    tiles,
                );
            }
            if comptime!(tiles.sums.has_values()) {
                let place = if comptime!(tiles.sums.has_dots()) {
                    places.held_values
                } else {
                    places.held_dots
                };
                write_gradient::<E, N, NV>(
                    sums.values,
                    f32::new(1.0),
                    place + staging,
                    tensor_map_address(value_gradient_boxes),
                    value_gradient,
                    &tile,
                    row,
                    comptime!(tiles.value_columns()),
                    tiles.value_dim,
                    comptime!(tiles.boxes_values()),
                    tiles,
                );
            }
            await_stores();
        }
    }
}

/// A warpgroup's gradients, of which only those that are asked for are used.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Gradients<ND: Size, NV: Size> {
    dots: Vector<f32, ND>,
    values: Vector<f32, NV>,
}

/// Passes over the blocks that the tile sees.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
fn sum<F: Float, NB: Size, NS: Size, NP: Size, ND: Size, NV: Size>(
    tile: &Held,
    sight: &Sight,
    row: i32,
    terms: &Tensor<f32>,
    mask: &ComptimeOption<&Tensor<u32>>,
    mask_places: &MaskPlaces,
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    integers: &ComptimeOption<&Tensor<i32>>,
    extent: &Extent,
    arguments: &ScoreArguments,
    places: &Places,
    warpgroup: u32,
    power: f32,
    #[comptime] tiles: GradientRowTiles,
    #[comptime] kind: HopperKind,
) -> Gradients<ND, NV> {
    let side = comptime!(kind.fragment.side);
    let lane = UNIT_POS % 32u32;
    let elected = u32::cast_from(lane == 0u32);
    let own_rows = warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32);
    let held_dots = uniform(descriptor(places.held_dots + own_rows));
    let held_values = uniform(descriptor(places.held_values + own_rows));
    let dot_operand = descriptor(places.dots);
    let value_operand = descriptor(places.values);
    let subtile_bytes = comptime!(tiles.columns * ROW_BYTES);
    let dot_sum_operand = transposed_descriptor(places.dots, subtile_bytes);
    let value_sum_operand = transposed_descriptor(places.values, subtile_bytes);
    let dot_stage = comptime!((tiles.dot_bytes() >> 4) as u32);
    let value_stage = comptime!((tiles.value_bytes() >> 4) as u32);
    let dots_product = comptime!(tiles.score_product(tiles.head_dim));
    let values_product = comptime!(tiles.score_product(tiles.value_dim));
    let scores = comptime!(tiles.columns / 2);
    let fragments = comptime!(tiles.fragments());

    let row_terms = terms_of_rows(terms, tile, row, extent, tiles);
    let mut dot_sums = Vector::<f32, ND>::zeroed();
    let mut value_sums = Vector::<f32, NV>::zeroed();
    let mut count = u32::new(0);
    let mut holes = u32::new(0);
    let first = first_visit(tile, extent, mask, mask_places, integers, kind);
    let mut head = first.head;
    let mut block = first.block;
    if head < tile.heads {
        barrier_wait(places.held_full, 0u32);
    }
    while head < tile.heads {
        let dot_turn = stage_of(count, tiles.dot_stages);
        let value_turn = stage_of(count, tiles.value_stages);
        let dot_full = places.dot_full + 8u32 * dot_turn.stage;
        let dot_empty = places.dot_empty + 8u32 * dot_turn.stage;
        let value_full = places.value_full + 8u32 * value_turn.stage;
        let value_empty = places.value_empty + 8u32 * value_turn.stage;
        let first_column = block * comptime!(tiles.columns as i32);
        let rows = held_rows(tile, extent, row, head, side);
        let standing = standing_of(tile, head, side);

        let started = multiply_scores::<NS>(
            held_dots,
            uniform(dot_operand + dot_turn.stage * dot_stage),
            dot_full,
            dot_turn.parity,
            dots_product,
        );
        let started_dp = if comptime!(tiles.sums.has_dots()) {
            multiply_scores::<NS>(
                held_values,
                uniform(value_operand + value_turn.stage * value_stage),
                value_full,
                value_turn.parity,
                values_product,
            )
        } else {
            Vector::<f32, NS>::zeroed()
        };
        let seen = view(
            &standing,
            &rows,
            block,
            0u32,
            extent,
            mask,
            mask_places,
            integers,
            tiles.columns,
            tiles.columns,
            kind,
        );
        let s = take_fragment::<NS>(
            started,
            scores,
            comptime!(fragments[0]),
            comptime!(usize::from(tiles.sums.has_dots())),
        );
        let block_terms = Terms {
            logsumexps: row_terms.logsumexps,
            deltas: row_terms.deltas,
            address: places.terms + dot_turn.stage * comptime!(tiles.term_bytes() as u32),
        };
        let made = weights::<F, NB, NS, NP>(
            s,
            &block_terms,
            first_column,
            seen.whole,
            &rows,
            seen.mask_words,
            bias,
            integers,
            sight,
            extent,
            arguments,
            power,
            tiles.columns,
            comptime!(tiles.sums.has_values()),
            tiles.half,
            kind.fragment,
        );
        let mut dirty = has_strangers(
            &tile.run,
            columns_end(extent, side),
            first_column,
            tiles.columns,
        );
        if comptime!(tiles.sums.has_values()) {
            if comptime!(kind.leaves_holes()) {
                if seen.may_have_holes {
                    dirty = tell::<NP>(places, made.p, holes, tiles);
                }
            }
            if dirty {
                barrier_wait(value_full, value_turn.parity);
                clean(
                    places.values + value_turn.stage * comptime!(tiles.value_bytes() as u32),
                    places,
                    tile,
                    first_column,
                    seen.may_have_holes,
                    holes,
                    comptime!(tiles.value_subtiles()),
                    tiles,
                    kind,
                );
            }
            value_sums = multiply_output::<NV, NP>(
                value_sums,
                made.p,
                uniform(value_sum_operand + value_turn.stage * value_stage),
                value_full,
                value_turn.parity,
                comptime!(tiles.sum_product(tiles.value_columns())),
            );
        }
        if comptime!(tiles.sums.has_dots()) {
            let dp = take_fragment::<NS>(
                started_dp,
                scores,
                comptime!(fragments[0]),
                comptime!(usize::from(tiles.sums.has_values())),
            );
            if comptime!(!tiles.sums.has_values()) {
                free_chunk(value_empty, elected, 0usize, 1usize);
            }
            let ds = dot_gradients::<NS, NP>(
                made.w,
                dp,
                &block_terms,
                seen.whole,
                tiles.columns,
                tiles.half,
                kind.fragment,
            );
            if comptime!(!tiles.sums.has_values() && kind.leaves_holes()) {
                if seen.may_have_holes {
                    dirty = tell::<NP>(places, ds, holes, tiles);
                }
            }
            if dirty {
                clean(
                    places.dots + dot_turn.stage * comptime!(tiles.dot_bytes() as u32),
                    places,
                    tile,
                    first_column,
                    seen.may_have_holes,
                    holes,
                    comptime!(tiles.dot_subtiles()),
                    tiles,
                    kind,
                );
            }
            dot_sums = multiply_output::<ND, NP>(
                dot_sums,
                ds,
                uniform(dot_sum_operand + dot_turn.stage * dot_stage),
                dot_full,
                dot_turn.parity,
                comptime!(tiles.sum_product(tiles.dot_columns())),
            );
            if comptime!(tiles.sums.has_values()) {
                value_sums = take_sums::<NV, NP>(
                    value_sums,
                    made.p,
                    comptime!(tiles.value_columns() / 2),
                    comptime!(fragments[3]),
                    1usize,
                );
                free_chunk(value_empty, elected, 1usize, 1usize);
            }
            dot_sums = take_sums::<ND, NP>(
                dot_sums,
                ds,
                comptime!(tiles.dot_columns() / 2),
                comptime!(fragments[2]),
                0usize,
            );
            free_chunk(dot_empty, elected, 0usize, 1usize);
        } else {
            free_chunk(dot_empty, elected, 1usize, 1usize);
            value_sums = take_sums::<NV, NP>(
                value_sums,
                made.p,
                comptime!(tiles.value_columns() / 2),
                comptime!(fragments[3]),
                0usize,
            );
            free_chunk(value_empty, elected, 0usize, 1usize);
        }
        if comptime!(kind.leaves_holes()) {
            holes += u32::cast_from(seen.may_have_holes);
        }
        count += 1u32;
        let next = visit_from(
            tile,
            head,
            block + 1i32,
            extent,
            mask,
            mask_places,
            integers,
            kind,
        );
        head = next.head;
        block = next.block;
    }
    Gradients::<ND, NV> {
        dots: dot_sums,
        values: value_sums,
    }
}

/// The terms of the thread's rows, where these are queries.
#[cube]
fn terms_of_rows(
    terms: &Tensor<f32>,
    tile: &Held,
    row: i32,
    extent: &Extent,
    #[comptime] tiles: GradientRowTiles,
) -> Terms {
    if comptime!(tiles.side == Side::Queries) {
        let start = tile.batch as usize * terms.stride(0) + tile.head as usize * terms.stride(1);
        let last = extent.q_len - 1i32;
        let first = start + min(tile.first_row + row, last) as usize;
        let second = start + min(tile.first_row + row + 8i32, last) as usize;
        Terms {
            logsumexps: pair(terms[first], terms[second]),
            deltas: pair(
                terms[first + terms.stride(2)],
                terms[second + terms.stride(2)],
            ),
            address: 0u32.runtime(),
        }
    } else {
        let zero = f32::new(0.0);
        Terms {
            logsumexps: pair(zero, zero),
            deltas: pair(zero, zero),
            address: 0u32.runtime(),
        }
    }
}

/// Tells which columns of the `count`-th block that may have holes some row of the tile uses, and whether there
/// are others.
#[cube]
fn tell<NP: Size>(
    places: &Places,
    p: Vector<u32, NP>,
    count: u32,
    #[comptime] tiles: GradientRowTiles,
) -> bool {
    tell_used(
        places.used,
        used_columns::<NP>(p, tiles.columns),
        0u32,
        count,
    );
    named_barrier(MEETING, comptime!(tiles.warpgroups * WARPGROUP));
    forget_used(places.used, count);
    has_holes(used_words(places.used, count), tiles.columns)
}

/// Writes zeros over rows of a block of `subtiles` subtiles that nobody in the tile sees.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
fn clean(
    address: u32,
    places: &Places,
    tile: &Held,
    first: i32,
    may_have_holes: bool,
    count: u32,
    #[comptime] subtiles: usize,
    #[comptime] tiles: GradientRowTiles,
    #[comptime] kind: HopperKind,
) {
    let units = comptime!(tiles.warpgroups * WARPGROUP);
    let words = used_words(places.used, count);
    let mut by_words = false;
    if comptime!(kind.leaves_holes()) {
        by_words = may_have_holes;
    }
    if by_words {
        if comptime!(kind.leaves_holes()) {
            clear_unseen(
                address,
                &tile.run,
                first,
                words,
                UNIT_POS,
                0usize,
                units,
                tiles.columns,
                subtiles,
                true,
            );
        }
    } else {
        clear_unseen(
            address,
            &tile.run,
            first,
            words,
            UNIT_POS,
            0usize,
            units,
            tiles.columns,
            subtiles,
            false,
        );
    }
    named_barrier(MEETING, units);
}

/// Writes a warpgroup's rows of a gradient, times `factor`.
#[cube]
fn write_gradient<E: Float, N: Size, NG: Size>(
    sums: Vector<f32, NG>,
    factor: f32,
    staging: u32,
    map: u64,
    gradient: &mut Tensor<Vector<E, N>>,
    tile: &Held,
    row: i32,
    #[comptime] columns: usize,
    #[comptime] width: usize,
    #[comptime] boxes: bool,
    #[comptime] tiles: GradientRowTiles,
) {
    if comptime!(boxes) {
        let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
        store_boxes::<NG>(
            sums,
            Pair {
                first: factor,
                second: factor,
            },
            staging,
            map,
            tile.batch,
            tile.head,
            tile.first_row + (warpgroup * comptime!(PRODUCT_ROWS as u32)) as i32,
            0u32,
            columns,
            comptime!(tiles.rows() * ROW_BYTES),
            true,
            tiles.half,
        );
    } else {
        #[unroll]
        for which in 0..2usize {
            let own = row + comptime!(8 * which as i32);
            write_row::<E, N, NG>(
                sums,
                factor,
                gradient,
                tile.batch,
                tile.head,
                tile.first_row + own,
                own < tile.rows,
                which,
                0u32,
                columns,
                width,
            );
        }
    }
}
