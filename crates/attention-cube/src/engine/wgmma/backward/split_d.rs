//! The backward on Hopper for heads up to 512 wide: two warpgroups have the same 64 rows, of queries or of keys,
//! and each has half of the columns of their gradient.
//!
//! Budget. Shared memory ([`GradientSplitDTiles::shared_memory`]), at head size 512: dots and values of the tile
//! 64 KB each, a ring of 5 × 16 KB, 16 KB of dS; for the values' gradient dots alone, and 8 × 16 KB. Registers a
//! thread: 128 of the gradient, 32 of S, 32 of dP. A block of 128 columns takes the tensor cores 4 clocks a column
//! of each product (2,048 at 512), and the shared memory about 0.9 of that; through the ring go 16 KB for every
//! 256 clocks, which the L2 cache must keep up with.
//!
//! Schedule. Through one ring come dots and values in chunks of 64 columns, then the operand of the last product
//! in chunks of 32 rows, alternately for either warpgroup. Each warpgroup has the scores of 64 of a block's
//! columns. Block by block: S and dP, of which the one becomes weights while the other is multiplied; dS, or P, to
//! shared memory for both; its product. Making dS takes a tenth of the products' time, and nothing is multiplied
//! then.

mod producer;

use self::producer::{Places, fetch, places};
use crate::engine::wgmma::backward::copies::GradientSteps;
use crate::engine::wgmma::chunked::{Ring, add_chunks, multiply_chunks};
use crate::engine::wgmma::output::{Target, write_gradient};
use crate::engine::wgmma::plan::{GradientSplitDTiles, SplitDTiles};
use crate::engine::wgmma::zero_fill::{
    has_unseen, tell_used, used_columns, used_words, zero_fill_unseen,
};
use crate::fragment::columns_end;
use crate::fragment::far::has_far;
use crate::fragment::gradient::{dot_gradients, p_scale, terms_of_block, terms_of_rows, weights};
use crate::fragment::scoring::{Scoring, scoring};
use crate::fragment::stationary::{
    Stationary, first_visit, held, position_of, row_factors, stationary_rows, stationary_work_tile,
    visit_from,
};
use crate::fragment::view::view;
use crate::fragment::work_tile::TileKind;
use crate::math::schedule::Grid;
use crate::math::score::ScoreArguments;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::hopper::barriers::warpgroup_barrier;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{
    async_proxy_fence, barrier_init, barrier_init_fence, barrier_wait, named_barrier,
    setmaxnreg_dec, setmaxnreg_inc, shared_address, store_matrices, store_shared, uniform,
};
use cube_kit::hopper::tma::await_stores;
use cube_kit::hopper::wgmma::{
    descriptor, free_chunk, matrix_row, take_fragment, transposed_descriptor,
};
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES, WARPGROUP};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Columns of a warpgroup's scores.
const HALF_COLUMNS: usize = GradientSplitDTiles::COLUMNS / 2;

/// Threads that multiply.
const CONSUMERS: usize = SplitDTiles::WARPGROUPS * WARPGROUP;

/// Chunks of a warpgroup that are multiplied with P or dS.
const OWN_CHUNKS: usize = GradientSplitDTiles::COLUMNS / SplitDTiles::VALUE_KEYS;

/// Where both warpgroups meet: the last P or dS has been read; the next is there.
const MEETING: u32 = 1;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn backward_split_d<
    E: Float,
    F: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NP: Size,
    NG: Size,
>(
    stationary_dots: &TensorMap<E, Tiled>,
    stationary_values: &TensorMap<E, Tiled>,
    dots: &TensorMap<E, Tiled>,
    values: &TensorMap<E, Tiled>,
    summed: &TensorMap<E, Tiled>,
    term_tma_tiles: &TensorMap<f32, Tiled>,
    terms: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<u32>>,
    bias: ComptimeOption<&Tensor<Vector<F, NB>>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    gradient_tma_tiles: &TensorMap<E, Tiled>,
    gradient: &mut Tensor<Vector<E, N>>,
    grid: Grid,
    extent: Extent,
    arguments: ScoreArguments,
    steps: GradientSteps,
    mask_places: MaskPlaces,
    group: u32,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: TileKind,
    #[define(E)] _element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NP, NG)] _fragments: [usize; 3],
) {
    let scoring = scoring::<F, NB>(extent, lengths_and_ids, mask, mask_places, bias, arguments);
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let places = places(shared_address(&memory), tiles);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(places.full + at, 1usize);
            // Each warp of both warpgroups arrives at every chunk, be it read or not.
            barrier_init(places.empty + at, 8usize);
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
            GradientSplitDTiles::ROWS,
            GradientSplitDTiles::COLUMNS,
            kind,
        );
        if UNIT_POS >= comptime!(CONSUMERS as u32) {
            setmaxnreg_dec(24usize);
            if UNIT_POS == comptime!(CONSUMERS as u32) {
                fetch(
                    stationary_dots,
                    stationary_values,
                    dots,
                    values,
                    summed,
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
            setmaxnreg_inc(240usize);
            let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
            // The row of the thread's first register, in the tile.
            let row = (UNIT_POS / 32u32 % 4u32 * 16u32 + UNIT_POS % 32u32 / 4u32) as i32;
            let sums = sum::<F, NB, NS, NP, NG>(
                &tile, row, terms, &scoring, &places, warpgroup, tiles, kind,
            );
            let factor = if comptime!(tiles.sums.has_dots()) {
                arguments.scale
            } else {
                f32::new(comptime!(1.0 / p_scale(tiles.half)))
            };
            let kind = comptime!(kind.fragment);
            let factors = row_factors(terms, &tile, row, &masking.extent, factor, kind);
            let target = Target {
                staging: places.stationary_dots
                    + warpgroup
                        * comptime!((tiles.own_subtiles() * PRODUCT_ROWS * ROW_BYTES) as u32),
                map: tensor_map_address(gradient_tma_tiles),
                row,
                first_row: 0i32,
                first_column: warpgroup * comptime!(tiles.own_columns() as u32),
            };
            write_gradient::<E, N, NG>(
                sums,
                factors,
                target,
                &tile,
                gradient,
                comptime!(tiles.output_shape()),
                kind.side,
            );
            await_stores();
        }
    }
}

/// Passes over the blocks that the tile sees.
#[cube]
fn sum<F: Float, NB: Size, NS: Size, NP: Size, NG: Size>(
    tile: &Stationary,
    row: i32,
    terms: &Tensor<f32>,
    scoring: &Scoring<F, NB>,
    places: &Places,
    warpgroup: u32,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, NG> {
    let masking = &scoring.masking;
    let side = comptime!(kind.fragment.side);
    let lane = UNIT_POS % 32u32;
    let ring = Ring {
        full: places.full,
        empty: places.empty,
        elected: u32::cast_from(lane == 0u32),
    };
    let stationary_dots = uniform(descriptor(places.stationary_dots));
    let stationary_values = uniform(descriptor(places.stationary_values));
    let operand = descriptor(places.stages + warpgroup * comptime!(SplitDTiles::HALF_BYTES as u32));
    let used = comptime!(HALF_COLUMNS / 2);
    let row_terms = terms_of_rows(
        terms,
        tile.batch,
        tile.head,
        tile.first_row + row,
        &masking.extent,
        kind.fragment,
    );

    let mut sums = Vector::<f32, NG>::zeroed();
    let mut count = u32::new(0);
    // Chunks that went through the ring.
    let mut passed = u32::new(0);
    let first = first_visit(tile, masking, kind);
    let mut head = first.head;
    let mut block = first.block;
    if head < tile.heads {
        barrier_wait(places.stationary_full, 0u32);
    }
    while head < tile.heads {
        let started = multiply_chunks::<NS>(
            stationary_dots,
            operand,
            ring,
            pipeline_state(passed, tiles.stages),
            places.empty,
            0u32,
            comptime!(tiles.score_product(tiles.head_dim, false)),
        );
        passed += comptime!(tiles.dot_chunks() as u32);
        let last_dots = places.empty + 8u32 * pipeline_state(passed - 1u32, tiles.stages).stage;
        let started_dp = if comptime!(tiles.sums.has_dots()) {
            multiply_chunks::<NS>(
                stationary_values,
                operand,
                ring,
                pipeline_state(passed, tiles.stages),
                last_dots,
                ring.elected,
                comptime!(tiles.score_product(tiles.value_dim, true)),
            )
        } else {
            Vector::<f32, NS>::zeroed()
        };
        let rows = stationary_rows::<F, NB>(tile, scoring, row, head, kind.fragment);
        let tile_position = position_of(tile, head, side);
        let seen = view(
            &tile_position,
            &rows,
            block,
            warpgroup * comptime!((HALF_COLUMNS / 32) as u32),
            masking,
            GradientSplitDTiles::COLUMNS,
            HALF_COLUMNS,
            kind,
        );
        let own_terms = places.terms
            + count % 2u32 * comptime!(tiles.term_bytes() as u32)
            + warpgroup * comptime!(4 * HALF_COLUMNS as u32);
        let block_terms = terms_of_block(&row_terms, own_terms, GradientSplitDTiles::COLUMNS);
        let has_far = has_far(&block_terms, HALF_COLUMNS, kind.fragment);
        // What is waited for here is all but the last chunk of what was multiplied after S.
        let s = take_fragment::<NS>(
            started,
            used,
            used,
            comptime!(usize::from(tiles.sums.has_dots())),
        );
        let made = weights::<F, NB, NS, NP>(
            s,
            &block_terms,
            block * comptime!(GradientSplitDTiles::COLUMNS as i32)
                + (warpgroup * comptime!(HALF_COLUMNS as u32)) as i32,
            &seen,
            &rows,
            scoring,
            has_far,
            HALF_COLUMNS,
            comptime!(tiles.sums.has_values()),
            tiles.half,
            kind.fragment,
        );
        let factors = if comptime!(tiles.sums.has_dots()) {
            let dp = take_fragment::<NS>(started_dp, used, used, 0usize);
            passed += comptime!(tiles.value_chunks() as u32);
            free_chunk(
                places.empty + 8u32 * pipeline_state(passed - 1u32, tiles.stages).stage,
                ring.elected,
                0usize,
                1usize,
            );
            dot_gradients::<NS, NP>(
                made.w,
                dp,
                &block_terms,
                seen.whole,
                HALF_COLUMNS,
                tiles.half,
                kind.fragment,
            )
        } else {
            free_chunk(last_dots, ring.elected, 0usize, 1usize);
            made.p
        };
        hand_over::<NP>(factors, places, warpgroup, count, kind);
        sums = add::<NG>(
            sums,
            places,
            tile,
            &masking.extent,
            block,
            count,
            passed,
            ring,
            warpgroup,
            tiles,
            kind,
        );
        passed += comptime!(tiles.sum_chunks() as u32);
        count += 1u32;
        let next = visit_from(tile, head, block + 1i32, masking, kind);
        head = next.head;
        block = next.block;
    }
    sums
}

/// Puts the warpgroup's half of P or dS of the `count`-th block where both read it, once both have read the last.
#[cube]
fn hand_over<NP: Size>(
    factors: Vector<u32, NP>,
    places: &Places,
    warpgroup: u32,
    count: u32,
    #[comptime] kind: TileKind,
) {
    if comptime!(kind.leaves_masked()) {
        tell_used(
            places.used,
            used_columns::<NP>(factors, HALF_COLUMNS),
            warpgroup * comptime!((HALF_COLUMNS / 4) as u32),
            count,
        );
    }
    let half = places.factors + warpgroup * comptime!(SplitDTiles::HALF_BYTES as u32);
    named_barrier(MEETING, CONSUMERS);
    #[unroll]
    for step in 0..comptime!(HALF_COLUMNS / 16) {
        store_matrices(
            matrix_row(half, step),
            factors.extract(comptime!(4 * step)),
            factors.extract(comptime!(4 * step + 1)),
            factors.extract(comptime!(4 * step + 2)),
            factors.extract(comptime!(4 * step + 3)),
        );
    }
    async_proxy_fence();
    named_barrier(MEETING, CONSUMERS);
}

/// Adds the `count`-th block's part, whose first chunk is `passed`: zeros stand for its rows that nobody in the tile
/// sees, whose product with 0 may be no number.
#[cube]
fn add<NG: Size>(
    sums: Vector<f32, NG>,
    places: &Places,
    tile: &Stationary,
    extent: &Extent,
    block: i32,
    count: u32,
    passed: u32,
    ring: Ring,
    warpgroup: u32,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, NG> {
    let product = comptime!(tiles.sum_product());
    let factors = uniform(descriptor(places.factors));
    let operand = transposed_descriptor(
        places.stages,
        comptime!(SplitDTiles::VALUE_KEYS * ROW_BYTES),
    );
    let first = block * comptime!(GradientSplitDTiles::COLUMNS as i32);
    let words = used_words(places.used, count);
    let dirty = has_unseen(
        &tile.run,
        columns_end(extent, kind.fragment.side),
        first,
        places.used,
        count,
        GradientSplitDTiles::COLUMNS,
        comptime!(kind.leaves_masked()),
    );
    let mut sums = sums;
    if dirty {
        #[unroll]
        for own in 0..OWN_CHUNKS {
            let pair = passed + comptime!((SplitDTiles::WARPGROUPS * own) as u32);
            let at = pipeline_state(pair + warpgroup, tiles.stages);
            let other = pipeline_state(pair + 1u32 - warpgroup, tiles.stages);
            barrier_wait(places.full + 8u32 * at.stage, at.parity);
            zero_fill_unseen(
                places.stages + at.stage * comptime!(SplitDTiles::STAGE_BYTES as u32),
                &tile.run,
                first,
                words,
                UNIT_POS % comptime!(WARPGROUP as u32),
                comptime!(own * SplitDTiles::VALUE_KEYS),
                WARPGROUP,
                SplitDTiles::VALUE_KEYS,
                comptime!(tiles.own_subtiles()),
                comptime!(kind.leaves_masked()),
            );
            warpgroup_barrier();
            sums = add_chunks::<NG>(
                sums, factors, operand, ring, at, other, own, 1usize, product,
            );
            sums = settled::<NG>(sums, tiles);
            free_own(places, ring, at.stage);
        }
    } else {
        let at = pipeline_state(passed + warpgroup, tiles.stages);
        let other = pipeline_state(passed + 1u32 - warpgroup, tiles.stages);
        sums = add_chunks::<NG>(
            sums, factors, operand, ring, at, other, 0usize, OWN_CHUNKS, product,
        );
        sums = settled::<NG>(sums, tiles);
        let last = pipeline_state(
            passed + warpgroup + comptime!((SplitDTiles::WARPGROUPS * (OWN_CHUNKS - 1)) as u32),
            tiles.stages,
        );
        free_own(places, ring, last.stage);
    }
    sums
}

/// The sums, once nothing is in flight.
#[cube]
fn settled<NG: Size>(
    sums: Vector<f32, NG>,
    #[comptime] tiles: GradientSplitDTiles,
) -> Vector<f32, NG> {
    take_fragment::<NG>(
        sums,
        comptime!(tiles.own_columns() / 2),
        comptime!(tiles.fragments()[2]),
        0usize,
    )
}

/// Gives back a chunk that has been read.
#[cube]
fn free_own(places: &Places, ring: Ring, stage: u32) {
    free_chunk(places.empty + 8u32 * stage, ring.elected, 0usize, 1usize);
}
