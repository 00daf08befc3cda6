//! The backward for heads up to 128 wide: each warp has 16 or 32 rows, of queries or of keys, and all columns of their gradients.
//!
//! Budget. Shared memory ([`GradientSplitMTiles::shared_memory`]): the dots and values of the tile, and two blocks of dots, values and
//! the queries' terms. Registers a thread, at head size 128 with keys held, 16 a warp, and blocks of 64 queries: 128 of the two
//! gradients, 32 of S, 32 of dP, which become 16 of P and 16 of dS. A warp of 16 rows reads from shared memory 4 KB of what
//! it holds and 16 KB of a block for each of S and dP, and 16 KB for each gradient; where a gradient is summed alone, warps of 32
//! rows read a block once for twice as many products. Shared memory bounds both, on cards whose matrix unit is that of a data center.
//!
//! Schedule. A cube a tile. All warps copy; a block's copies start a block ahead, behind the one barrier of a block, which says
//! that the last block has been read and the next one is there. From a barrier to the next every warp goes its own way, so that one
//! multiplies while another makes weights: S and dP, the next block's copies while these are multiplied, P and dS, and then both
//! sums. With the values' sums before dP fewer registers would be needed at once, but ptxas moves dP ahead of these and spills.

mod blocks;
mod weights;

use self::blocks::{copy_block, copy_stationary};
use self::weights::weigh;
use super::part::{Part, alike, seen_by_warp, terms_of_warp, warp_has_far};
use crate::engine::mma::fragments::{fragment_of, used_by_warp};
use crate::engine::mma::plan::GradientSplitMTiles;
use crate::fragment::gradient::p_scale;
use crate::fragment::output::{OutputPart, without_blind};
use crate::fragment::scoring::{Scoring, scoring};
use crate::fragment::stationary::{
    Stationary, Visit, first_visit, held, row_factors, stationary_work_tile, visit_from,
    write_gradient_rows,
};
use crate::fragment::work_tile::TileKind;
use crate::math::schedule::Grid;
use crate::math::score::ScoreArguments;
use crate::math::side::Side;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::copy::{await_copies, commit_copies};
use cube_kit::ampere::product::{Scores, Sums, add_product, left_address, right_address, scores};
use cube_kit::hopper::accumulator::pair;
use cube_kit::hopper::ptx::{shared_address, uniform};
use cubecl::prelude::*;

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
    AS: Size,
    AP: Size,
    AD: Size,
    AV: Size,
>(
    stationary_dots: &Tensor<E>,
    stationary_values: &Tensor<E>,
    dots: &Tensor<E>,
    values: &Tensor<E>,
    terms: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<u32>>,
    bias: ComptimeOption<&Tensor<Vector<F, NB>>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    dot_gradient: &mut Tensor<Vector<E, N>>,
    value_gradient: &mut Tensor<Vector<E, N>>,
    grid: Grid,
    extent: Extent,
    arguments: ScoreArguments,
    mask_places: MaskPlaces,
    group: u32,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
    #[define(E)] _element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NP, ND, NV, AS, AP, AD, AV)] _vectors: [usize; 8],
) {
    let scoring = scoring::<F, NB>(extent, lengths_and_ids, mask, mask_places, bias, arguments);
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
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
        let tile = alike(tile);
        let first = first_visit(&tile, masking, kind);
        if first.head < tile.heads {
            copy_stationary::<E>(stationary_dots, stationary_values, &tile, start, tiles);
        }
        let warp_row = uniform(UNIT_POS / 32u32) * comptime!(tiles.warp_rows() as u32);
        // The row of the thread's first register, in the tile.
        let row = (warp_row + UNIT_POS % 32u32 / 4u32) as i32;
        let sums = sum::<E, F, NB, NS, NP, AS, AP, AD, AV>(
            dots, values, terms, &tile, first, warp_row, row, &scoring, start, tiles, kind,
        );
        #[unroll]
        for fragment in 0..tiles.fragments {
            let row = row + comptime!((fragment * FRAGMENT_ROWS) as i32);
            if comptime!(tiles.sums.has_dots()) {
                let factors = row_factors(
                    terms,
                    &tile,
                    row,
                    &masking.extent,
                    arguments.scale,
                    kind.fragment,
                );
                let own = fragment_of::<AD, ND>(sums.dots, fragment);
                let own = if comptime!(tiles.side == Side::Queries) {
                    without_blind::<ND>(own, factors, comptime!(tiles.dot_columns()))
                } else {
                    own
                };
                write_gradient_rows::<E, N, ND>(
                    OutputPart::<ND> { o: own, factors },
                    dot_gradient,
                    &tile,
                    row,
                    0u32,
                    comptime!(tiles.dot_columns()),
                    tiles.head_dim,
                );
            }
            if comptime!(tiles.sums.has_values()) {
                let factor = f32::new(comptime!(1.0 / p_scale(tiles.half)));
                let part = OutputPart::<NV> {
                    o: fragment_of::<AV, NV>(sums.values, fragment),
                    factors: pair(factor, factor),
                };
                write_gradient_rows::<E, N, NV>(
                    part,
                    value_gradient,
                    &tile,
                    row,
                    0u32,
                    comptime!(tiles.value_columns()),
                    tiles.value_dim,
                );
            }
        }
    }
}

/// A warp's gradients, of which only those that are asked for are used.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Gradients<AD: Size, AV: Size> {
    dots: Vector<f32, AD>,
    values: Vector<f32, AV>,
}

/// Passes over the blocks that the tile sees, from the `first` on.
#[cube]
fn sum<E: Float, F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size, AD: Size, AV: Size>(
    dots: &Tensor<E>,
    values: &Tensor<E>,
    terms: &Tensor<f32>,
    tile: &Stationary,
    first: Visit,
    warp_row: u32,
    row: i32,
    scoring: &Scoring<F, NB>,
    start: u32,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
) -> Gradients<AD, AV> {
    let masking = &scoring.masking;
    let blocks = start + comptime!(tiles.blocks_at() as u32);
    let stationary_dots = left_address(start, warp_row);
    let stationary_values = stationary_dots + comptime!(tiles.stationary_values_at() as u32);
    // Of the first block: its rows as columns of S and dP, and as what is summed.
    let scored_at = right_address(blocks);
    let summed_at = left_address(blocks, 0u32);
    let to_values = comptime!(tiles.block_values_at() as u32);

    let part = comptime!(Part {
        fragments: tiles.fragments,
        columns: tiles.columns,
        block: tiles.columns,
    });
    let row_terms = terms_of_warp(terms, tile, row, &masking.extent, part, kind.fragment);
    let mut dot_sums = Vector::<f32, AD>::zeroed();
    let mut value_sums = Vector::<f32, AV>::zeroed();
    let mut head = first.head;
    let mut block = first.block;
    // Of the block that is there, from the first of the two.
    let mut stage = 0u32;
    if head < tile.heads {
        copy_block::<E>(dots, values, terms, tile, head, block, blocks, tiles);
        commit_copies();
    }
    while head < tile.heads {
        let next = visit_from(tile, head, block + 1i32, masking, kind);
        let other = comptime!(tiles.block_bytes() as u32) - stage;
        await_copies(0usize);
        sync_cube();
        let seen = seen_by_warp::<F, NB>(tile, row, head, block, 0u32, scoring, part, kind);
        let terms_at = blocks + stage + comptime!(tiles.block_terms_at() as u32);
        let has_far = warp_has_far(
            &row_terms,
            terms_at,
            tiles.columns,
            tiles.columns,
            kind.fragment,
        );
        let s = scores::<AS>(
            stationary_dots,
            scored_at + stage,
            comptime!(score_product(tiles, tiles.head_dim)),
        );
        let dp = if comptime!(tiles.sums.has_dots()) {
            scores::<AS>(
                stationary_values,
                scored_at + stage + to_values,
                comptime!(score_product(tiles, tiles.value_dim)),
            )
        } else {
            s
        };
        // Behind the products, which hide how strides are read and places are counted.
        if next.head < tile.heads {
            copy_block::<E>(
                dots,
                values,
                terms,
                tile,
                next.head,
                next.block,
                blocks + other,
                tiles,
            );
        }
        commit_copies();
        let made = weigh::<F, NB, NS, NP, AS, AP>(
            s,
            dp,
            &seen,
            &row_terms,
            terms_at,
            block,
            scoring,
            has_far,
            tiles,
            kind.fragment,
        );
        let may_have_masked = seen.first.view.may_have_masked;
        if comptime!(tiles.sums.has_values()) {
            value_sums = with_block::<AV, AP>(
                value_sums,
                made.p,
                summed_at + stage + to_values,
                may_have_masked,
                comptime!(tiles.value_columns()),
                tiles,
                kind,
            );
        }
        if comptime!(tiles.sums.has_dots()) {
            dot_sums = with_block::<AD, AP>(
                dot_sums,
                made.ds,
                summed_at + stage,
                may_have_masked,
                comptime!(tiles.dot_columns()),
                tiles,
                kind,
            );
        }
        head = next.head;
        block = next.block;
        stage = other;
    }
    Gradients::<AD, AV> {
        dots: dot_sums,
        values: value_sums,
    }
}

/// The sums with a block's part, whose rows are `right`. Rows that the warp does not use may hold anything, where the block
/// `may_have_masked` ones.
#[cube]
fn with_block<A: Size, AP: Size>(
    sums: Vector<f32, A>,
    left: Vector<u32, AP>,
    right: u32,
    may_have_masked: bool,
    #[comptime] columns: usize,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, A> {
    let mut sums = sums;
    let plain = comptime!(sum_product(tiles, columns, false));
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            let used = used_by_warp::<AP>(left, tiles.columns, tiles.fragments);
            let masked = comptime!(sum_product(tiles, columns, true));
            sums = add_product::<A, AP>(sums, left, right, used, masked);
        } else {
            sums = add_product::<A, AP>(sums, left, right, 0u32, plain);
        }
    } else {
        sums = add_product::<A, AP>(sums, left, right, 0u32, plain);
    }
    sums
}

/// The product that makes S or dP, whose operands have `depth` columns.
const fn score_product(tiles: GradientSplitMTiles, depth: usize) -> Scores {
    Scores {
        fragments: tiles.fragments,
        columns: tiles.columns,
        depth,
        left_rows: tiles.rows(),
        right_rows: tiles.columns,
        half: tiles.half,
    }
}

/// The product that adds to a gradient of so many columns.
const fn sum_product(tiles: GradientSplitMTiles, columns: usize, masked: bool) -> Sums {
    Sums {
        fragments: tiles.fragments,
        columns,
        depth: tiles.columns,
        right_rows: tiles.columns,
        masked,
        half: tiles.half,
    }
}
