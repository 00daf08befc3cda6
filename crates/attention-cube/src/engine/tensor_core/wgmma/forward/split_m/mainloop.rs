//! The mainloop of a consumer warpgroup in the split-M forward, over the blocks of K and V that one tile sees.

use super::biases::biases_of;
use super::producer::SharedOffsets;
use super::products::{take_output, take_scores};
use super::softmax::{draw_block, packed, softmax};
use super::zero_fill::{
    first_row_hides, may_have_masked_in, signal_used_keys_of, zero_fill_values,
};
use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::bias::BiasWords;
use crate::engine::tensor_core::common::block_mask::block_mask;
use crate::engine::tensor_core::common::block_range::{next_block, tile_position};
use crate::engine::tensor_core::common::output::Finished;
use crate::engine::tensor_core::common::score::score;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::softmax::{empty_state, quad_sum, rescale};
use crate::engine::tensor_core::common::tile_scheduler::{AssignedTile, TileKind};
use crate::engine::tensor_core::wgmma::forward::pages::zeros_from;
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitMTiles;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::barriers::{ordering_barrier_arrive, ordering_barrier_wait};
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_wait, barrier_wait_both};
use cube_kit::hopper::wgmma::{
    descriptor, multiply_output, multiply_scores, transposed_descriptor,
};
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::accumulator::pair;
use cube_kit::nvidia::ptx::uniform;
use cubecl::prelude::*;

/// The index of the warpgroup of a consumer thread, and a flag. The flag is 1 in the one thread of each warp that
/// arrives at barriers for the warp.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Thread {
    pub warpgroup: u32,
    /// A flag that is 1 in the one lane of a warp that arrives at barriers for the warp, else 0.
    pub elected: u32,
}

/// Two counts of blocks that a CTA has processed: all blocks (`blocks`), and those blocks that may have keys hidden
/// from the whole tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct BlockCounts {
    pub blocks: u32,
    pub masked: u32,
}

/// A warpgroup's results for a tile, and the CTA's block counts after the tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct MainloopOutput<NO: Size> {
    pub finished: Finished<NO>,
    pub visited: BlockCounts,
}

/// Runs the mainloop over the blocks of a tile. `visited` has the counts of the blocks that the CTA has processed for
/// its earlier tiles.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(super) fn run_mainloop<F: Float, NB: Size, NS: Size, NP: Size, NO: Size>(
    assigned_tile: &AssignedTile,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    offsets: &SharedOffsets,
    thread: Thread,
    queries_parity: u32,
    visited: BlockCounts,
    scale_log2: f32,
    #[comptime] tiles: WgmmaSplitMTiles,
    #[comptime] kind: TileKind,
) -> MainloopOutput<NO> {
    let masking = &scoring.masking;
    let tile = &assigned_tile.tile;
    let tile_position = tile_position(tile);
    let warpgroup = thread.warpgroup;
    let elected = thread.elected;
    let negative_infinity = scoring.arguments.negative_infinity;
    let query_operand = uniform(descriptor(
        offsets.queries + warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32),
    ));
    let key_operand = descriptor(offsets.keys);
    let value_operand = transposed_descriptor(offsets.values, comptime!(tiles.keys * ROW_BYTES));
    let key_stage = comptime!((tiles.key_bytes() >> 4) as u32);
    let value_stage = comptime!((tiles.value_bytes() >> 4) as u32);

    let mut o = Vector::<f32, NO>::zeroed();
    let mut softmax_state = empty_state(negative_infinity);
    let mut count = uniform(visited.blocks);
    let mut masked = visited.masked;
    barrier_wait(offsets.queries_full, queries_parity);
    if assigned_tile.first < tile.end_block {
        let mut block = assigned_tile.first;
        let slot = pipeline_state(count, tiles.stages);
        let key_block = uniform(key_operand + slot.stage * key_stage);
        barrier_wait(offsets.key_full + 8u32 * slot.stage, slot.parity);
        let started =
            multiply_scores::<NS>(query_operand, key_block, comptime!(tiles.score_product()));
        let seen = block_mask(
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
        let biases = biases_of::<F, NB>(scoring, rows, block, count, offsets, thread, tiles, kind);
        let words = draw_block::<F, NB, NP>(block, rows, scoring, tiles, kind);
        let s = take_scores::<NS>(
            started,
            offsets.key_empty + 8u32 * slot.stage,
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
        let made = softmax::<NS>(s, softmax_state, scale_log2, negative_infinity, tiles);
        // The loop updates `running` instead of `softmax_state`. With `softmax_state`, register moves would cost 5 % of the
        // speed at head size 128 (docs/forward-split-m.md).
        let mut running = made.softmax_state;
        // The softmax of the first block needs no rescale of O, because O is still 0.
        running.moved = false.runtime();
        running.factor = pair(1.0f32, 1.0f32);
        let mut p =
            packed::<F, NB, NS, NP>(made.exp_scores, words, block, rows, scoring, tiles, kind);
        let mut masked_count = visited.masked;
        if comptime!(kind.leaves_masked()) {
            if may_have_masked {
                signal_used_keys_of(offsets, p, masked_count, elected, tiles);
            }
        }

        let mut next = next_block(tile, block + 1i32, masking, kind);
        while next < tile.end_block {
            let slot = pipeline_state(count, tiles.stages);
            let next_slot = pipeline_state(count + 1u32, tiles.stages);
            zero_fill_values(
                offsets,
                tile,
                zeros_from(&masking.seq_lens, kind),
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
            let key_full = offsets.key_full + 8u32 * next_slot.stage;
            let value_full = offsets.value_full + 8u32 * slot.stage;
            let mut biases = BiasWords::zeroed();
            if comptime!(tiles.orders_warpgroups) {
                // Load the biases and wait for K and V before the ping-pong barrier, at which this warpgroup's turn
                // begins. During the turn, these steps would delay the other warpgroups.
                biases = biases_of::<F, NB>(
                    scoring,
                    rows,
                    next,
                    count + 1u32,
                    offsets,
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
            let seen = block_mask(
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
                    offsets,
                    thread,
                    tiles,
                    kind,
                );
            }
            let words = draw_block::<F, NB, NP>(next, rows, scoring, tiles, kind);
            let s = take_scores::<NS>(
                started,
                offsets.key_empty + 8u32 * next_slot.stage,
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
            let made = softmax::<NS>(s, running, scale_log2, negative_infinity, tiles);
            o = take_output::<NO, NP>(
                o,
                p,
                offsets.value_empty + 8u32 * slot.stage,
                elected,
                tiles,
            );
            // P' is the P of the next block. The kernel rounds P' only after the GEMM `P V` has finished, when the
            // registers of P are free. An earlier rounding would need more registers, or would make ptxas insert a wait
            // after every wgmma (warning C7513).
            p = packed::<F, NB, NS, NP>(made.exp_scores, words, next, rows, scoring, tiles, kind);
            if comptime!(kind.leaves_masked()) {
                masked_count += u32::cast_from(may_have_masked);
                may_have_masked = may_have_masked_in(&seen, hides, kind);
                if may_have_masked {
                    signal_used_keys_of(offsets, p, masked_count, elected, tiles);
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
            offsets,
            tile,
            zeros_from(&masking.seq_lens, kind),
            block,
            slot,
            may_have_masked,
            masked_count,
            true,
            tiles,
            kind,
        );
        let value_block = uniform(value_operand + slot.stage * value_stage);
        barrier_wait(offsets.value_full + 8u32 * slot.stage, slot.parity);
        o = multiply_output::<NO, NP>(o, p, value_block, comptime!(tiles.output_product()));
        o = take_output::<NO, NP>(
            o,
            p,
            offsets.value_empty + 8u32 * slot.stage,
            elected,
            tiles,
        );
        softmax_state = running;
        count += 1u32;
        masked = masked_count + u32::cast_from(may_have_masked);
    }

    MainloopOutput::<NO> {
        finished: Finished::<NO> {
            o,
            reference: softmax_state.row_max.reference,
            sums: quad_sum(softmax_state.sums),
        },
        visited: BlockCounts {
            blocks: count,
            masked,
        },
    }
}
