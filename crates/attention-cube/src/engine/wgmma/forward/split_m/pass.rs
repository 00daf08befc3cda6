//! A warpgroup passes over a tile's blocks.

use super::biases::biases_of;
use super::probabilities::{packed, softmax};
use super::producer::Places;
use super::products::{take_output, take_scores};
use super::zero_fill::{first_row_hides, may_have_masked_in, tell_used_by, zero_fill_values};
use crate::engine::wgmma::plan::SplitMTiles;
use crate::fragment::RowPair;
use crate::fragment::bias::BiasWords;
use crate::fragment::output::Finished;
use crate::fragment::score::score;
use crate::fragment::scoring::Scoring;
use crate::fragment::softmax::{empty_state, rescale, totals};
use crate::fragment::view::view;
use crate::fragment::visits::{next_block, tile_position};
use crate::fragment::work_tile::{AssignedTile, TileKind};
use cube_kit::hopper::accumulator::pair;
use cube_kit::hopper::barriers::{ordering_barrier_arrive, ordering_barrier_wait};
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_wait, barrier_wait_both, uniform};
use cube_kit::hopper::wgmma::{
    descriptor, multiply_output, multiply_scores, transposed_descriptor,
};
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES};
use cubecl::prelude::*;

/// A thread that multiplies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Thread {
    pub warpgroup: u32,
    /// 1 for the lane that speaks for its warp, else 0.
    pub elected: u32,
}

/// The blocks that a cube has visited, and how many of them may have had holes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Visited {
    pub blocks: u32,
    pub masked: u32,
}

/// A tile's part of a warpgroup, and what the cube has visited.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Attended<NO: Size> {
    pub finished: Finished<NO>,
    pub visited: Visited,
}

/// Visits a tile's blocks, after those of other tiles.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn attend<F: Float, NB: Size, NS: Size, NP: Size, NO: Size>(
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
