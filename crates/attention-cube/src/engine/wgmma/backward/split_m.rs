//! The backward on Hopper for heads up to 256 wide: each warpgroup has 64 rows, of queries or of keys, and all
//! columns of their gradients.
//!
//! Budget. Shared memory ([`GradientSplitMTiles::shared_memory`]): the dots and values of the tile, a ring of
//! blocks of dots and one of blocks of values. Registers a thread, at head size 256: 128 of the gradient, 32 of
//! S, 32 of dP, 16 of dS. A block takes the tensor cores `rows · columns · head_dim / 2048` clocks a product of
//! dots, and as many a product of values; S and dP read both operands from shared memory, which at 64 columns
//! takes as long as the product.
//!
//! Schedule. One thread of the fetching warpgroup keeps the rings full; everybody else, block by block: issue the
//! products of P and dS, and S' of the next block behind them; wait for those, free the block, and issue dP' behind
//! S'; make P' and dS' of S' and dP'. Warpgroups take turns to issue, so that one makes these while the other
//! multiplies.

mod producer;
mod products;
mod weights;
mod zero_fill;

use self::producer::{Places, fetch, places};
use self::products::{
    Gradients, await_dots, await_values, block_operands, multiply, operands, settle, start_dp,
    start_s,
};
use self::weights::{block_has_far, weigh};
use self::zero_fill::zero_fill_block;
use crate::engine::wgmma::backward::copies::GradientSteps;
use crate::engine::wgmma::output::{Target, write_gradient};
use crate::engine::wgmma::plan::GradientSplitMTiles;
use crate::fragment::gradient::{p_scale, terms_of_rows};
use crate::fragment::scoring::{Scoring, scoring};
use crate::fragment::stationary::{
    Stationary, first_visit, held, row_factors, seen_by, stationary_work_tile, visit_from,
};
use crate::fragment::work_tile::TileKind;
use crate::math::schedule::Grid;
use crate::math::score::ScoreArguments;
use crate::math::side::Side;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::hopper::accumulator::pair;
use cube_kit::hopper::barriers::{ordering_barrier_arrive, ordering_barrier_wait};
use cube_kit::hopper::ptx::{
    barrier_init, barrier_init_fence, barrier_wait, setmaxnreg_dec, setmaxnreg_inc, shared_address,
    store_shared, uniform,
};
use cube_kit::hopper::tma::await_stores;
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES, WARPGROUP};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Where all warps that multiply meet, before a block is cleaned and after.
const MEETING: u32 = 1;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn backward_split_m<
    E: Float,
    F: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NP: Size,
    ND: Size,
    NV: Size,
>(
    stationary_dots: &TensorMap<E, Tiled>,
    stationary_values: &TensorMap<E, Tiled>,
    dots: &TensorMap<E, Tiled>,
    values: &TensorMap<E, Tiled>,
    term_tma_tiles: &TensorMap<f32, Tiled>,
    terms: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<u32>>,
    bias: ComptimeOption<&Tensor<Vector<F, NB>>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    dot_gradient_tma_tiles: &TensorMap<E, Tiled>,
    dot_gradient: &mut Tensor<Vector<E, N>>,
    value_gradient_tma_tiles: &TensorMap<E, Tiled>,
    value_gradient: &mut Tensor<Vector<E, N>>,
    grid: Grid,
    extent: Extent,
    arguments: ScoreArguments,
    steps: GradientSteps,
    mask_places: MaskPlaces,
    group: u32,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
    #[define(E)] _element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NP, ND, NV)] _fragments: [usize; 4],
) {
    let scoring = scoring::<F, NB>(extent, lengths_and_ids, mask, mask_places, bias, arguments);
    let masking = &scoring.masking;
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
        barrier_init(places.stationary_full, 1usize);
        barrier_init_fence();
        if comptime!(kind.leaves_masked()) {
            #[unroll]
            for word in 0..12usize {
                store_shared(places.used + comptime!(4 * word as u32), 0u32);
            }
        }
    }
    sync_cube();

    let index = CUBE_POS as u32;
    if index < grid.cubes {
        let work_tile = stationary_work_tile(&grid, index, kind.fragment.side);
        let tile = held(
            work_tile,
            masking,
            group,
            comptime!(tiles.rows()),
            tiles.columns,
            kind,
        );
        if UNIT_POS >= comptime!(consumers as u32) {
            setmaxnreg_dec(comptime!(tiles.thread_registers()[0]));
            if UNIT_POS == comptime!(consumers as u32) {
                fetch(
                    stationary_dots,
                    stationary_values,
                    dots,
                    values,
                    term_tma_tiles,
                    masking,
                    &tile,
                    &steps,
                    &places,
                    tiles,
                    kind,
                );
            }
        } else {
            setmaxnreg_inc(comptime!(tiles.thread_registers()[1]));
            let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
            // The row of the thread's first register, in the tile.
            let row = (UNIT_POS / 32u32 * 16u32 + UNIT_POS % 32u32 / 4u32) as i32;
            let sums = sum::<F, NB, NS, NP, ND, NV>(
                &tile, row, terms, &scoring, &places, warpgroup, tiles, kind,
            );
            let staging = warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32);
            let first_row = (warpgroup * comptime!(PRODUCT_ROWS as u32)) as i32;
            let kind = comptime!(kind.fragment);
            if comptime!(tiles.sums.has_dots()) {
                let scale = arguments.scale;
                let factors = row_factors(terms, &tile, row, &masking.extent, scale, kind);
                let target = Target {
                    staging: places.stationary_dots + staging,
                    map: tensor_map_address(dot_gradient_tma_tiles),
                    row,
                    first_row,
                    first_column: 0u32,
                };
                write_gradient::<E, N, ND>(
                    sums.dots,
                    factors,
                    target,
                    &tile,
                    dot_gradient,
                    comptime!(tiles.dot_shape()),
                    kind.side,
                );
            }
            if comptime!(tiles.sums.has_values()) {
                let place = if comptime!(tiles.sums.has_dots()) {
                    places.stationary_values
                } else {
                    places.stationary_dots
                };
                let target = Target {
                    staging: place + staging,
                    map: tensor_map_address(value_gradient_tma_tiles),
                    row,
                    first_row,
                    first_column: 0u32,
                };
                let factor = f32::new(comptime!(1.0 / p_scale(tiles.half)));
                write_gradient::<E, N, NV>(
                    sums.values,
                    pair(factor, factor),
                    target,
                    &tile,
                    value_gradient,
                    comptime!(tiles.value_shape()),
                    Side::Keys,
                );
            }
            await_stores();
        }
    }
}

/// Passes over the blocks that the tile sees.
#[cube]
fn sum<F: Float, NB: Size, NS: Size, NP: Size, ND: Size, NV: Size>(
    tile: &Stationary,
    row: i32,
    terms: &Tensor<f32>,
    scoring: &Scoring<F, NB>,
    places: &Places,
    warpgroup: u32,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
) -> Gradients<ND, NV> {
    let masking = &scoring.masking;
    let lane = UNIT_POS % 32u32;
    let elected = u32::cast_from(lane == 0u32);
    let operands = operands(places, warpgroup, tiles);
    let row_terms = terms_of_rows(
        terms,
        tile.batch,
        tile.head,
        tile.first_row + row,
        &masking.extent,
        kind.fragment,
    );
    let mut dots = Vector::<f32, ND>::zeroed();
    let mut values = Vector::<f32, NV>::zeroed();
    let first = first_visit(tile, masking, kind);
    if first.head < tile.heads {
        barrier_wait(places.stationary_full, 0u32);
        // The first turn is the first warpgroup's.
        if warpgroup == comptime!(tiles.warpgroups as u32 - 1) {
            ordering_barrier_arrive(warpgroup, tiles.warpgroups);
        }
        let mut count = u32::new(0);
        let mut masked = u32::new(0);
        let mut block = first.block;
        let next_operands = block_operands(operands.dots, operands.values, count, tiles);
        await_dots(places, count, tiles);
        let s = start_s::<NS>(operands.stationary_dots, next_operands, tiles);
        let has_far = block_has_far(&row_terms, places, count, tiles, kind);
        await_values(places, count, tiles);
        let dp = start_dp::<NS>(operands.stationary_values, next_operands, tiles);
        let seen = seen_by::<F, NB>(
            tile,
            row,
            first.head,
            block,
            0u32,
            scoring,
            tiles.columns,
            tiles.columns,
            kind,
        );
        let made = weigh::<F, NB, NS, NP>(
            s, dp, &seen, &row_terms, block, scoring, places, count, elected, has_far, tiles, kind,
        );
        let mut p = made.p;
        let mut ds = made.ds;
        let mut may_have_masked = seen.view.may_have_masked;

        let next = visit_from(tile, first.head, block + 1i32, masking, kind);
        let mut next_head = next.head;
        let mut next_block = next.block;
        while next_head < tile.heads {
            zero_fill_block::<NP>(
                p,
                ds,
                places,
                tile,
                &masking.extent,
                block,
                count,
                may_have_masked,
                masked,
                tiles,
                kind,
            );
            // In its turn a warpgroup keeps the others waiting.
            let summed = block_operands(operands.summed_dots, operands.summed_values, count, tiles);
            let next_operands = block_operands(operands.dots, operands.values, count + 1u32, tiles);
            ordering_barrier_wait(warpgroup);
            let added = multiply::<NP, ND, NV>(dots, values, p, ds, summed, tiles);
            await_dots(places, count + 1u32, tiles);
            let s = start_s::<NS>(operands.stationary_dots, next_operands, tiles);
            let seen = seen_by::<F, NB>(
                tile,
                row,
                next_head,
                next_block,
                0u32,
                scoring,
                tiles.columns,
                tiles.columns,
                kind,
            );
            let has_far = block_has_far(&row_terms, places, count + 1u32, tiles, kind);
            let settled = settle::<NP, ND, NV>(added, p, ds, places, count, elected, 1usize, tiles);
            // Only now, since P and dS have given their registers back.
            await_values(places, count + 1u32, tiles);
            let dp = start_dp::<NS>(operands.stationary_values, next_operands, tiles);
            ordering_barrier_arrive(warpgroup, tiles.warpgroups);
            dots = settled.dots;
            values = settled.values;
            if comptime!(kind.leaves_masked()) {
                masked += u32::cast_from(may_have_masked);
                may_have_masked = seen.view.may_have_masked;
            }
            block = next_block;
            count += 1u32;
            let made = weigh::<F, NB, NS, NP>(
                s, dp, &seen, &row_terms, block, scoring, places, count, elected, has_far, tiles,
                kind,
            );
            p = made.p;
            ds = made.ds;
            let next = visit_from(tile, next_head, block + 1i32, masking, kind);
            next_head = next.head;
            next_block = next.block;
        }
        zero_fill_block::<NP>(
            p,
            ds,
            places,
            tile,
            &masking.extent,
            block,
            count,
            may_have_masked,
            masked,
            tiles,
            kind,
        );
        let summed = block_operands(operands.summed_dots, operands.summed_values, count, tiles);
        let added = multiply::<NP, ND, NV>(dots, values, p, ds, summed, tiles);
        let settled = settle::<NP, ND, NV>(added, p, ds, places, count, elected, 0usize, tiles);
        dots = settled.dots;
        values = settled.values;
    }
    Gradients::<ND, NV> { dots, values }
}
