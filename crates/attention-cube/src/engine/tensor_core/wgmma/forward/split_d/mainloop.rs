//! The mainloop of a consumer warpgroup in the split-D forward, over the blocks of K and V that one tile sees.

use super::producer::SharedOffsets;
use super::softmax::{
    exchange, free_own_first_chunk, free_values, probabilities, share_first_chunk, softmax,
};
use super::warpgroups::{CONSUMERS, HALF_KEYS, MAXIMA, OWN_CHUNKS, PROBABILITIES};
use super::zero_fill::zero_fill_values;
use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::bias::bias_words;
use crate::engine::tensor_core::common::block_mask::block_mask;
use crate::engine::tensor_core::common::block_range::{next_block, tile_position};
use crate::engine::tensor_core::common::output::Finished;
use crate::engine::tensor_core::common::score::score;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::softmax::{empty_state, quad_sum, rescale};
use crate::engine::tensor_core::common::tile_scheduler::{AssignedTile, TileKind};
use crate::engine::tensor_core::wgmma::chunked_gemm::{
    Ring, load_first_queries, multiply_chunked_output, multiply_chunked_scores,
};
use crate::engine::tensor_core::wgmma::forward::pages::zeros_from;
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitDTiles;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::barrier_wait;
use cube_kit::hopper::wgmma::{descriptor, free_chunk, take_fragment, transposed_descriptor};
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::accumulator::pair;
use cube_kit::nvidia::ptx::{named_barrier, uniform};
use cubecl::prelude::*;

/// A warpgroup's results for a tile, and the number of blocks that the CTA has processed in all tiles so far.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct MainloopOutput<NO: Size> {
    pub finished: Finished<NO>,
    pub visited: u32,
}

/// Runs the mainloop over the blocks of a tile. `visited` is the number of blocks that the CTA has processed in earlier
/// tiles.
#[cube]
pub(super) fn run_mainloop<F: Float, NB: Size, NS: Size, NQ: Size, NO: Size>(
    assigned_tile: &AssignedTile,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    offsets: &SharedOffsets,
    ring: Ring,
    queries_parity: u32,
    visited: u32,
    scale_log2: f32,
    #[comptime] tiles: WgmmaSplitDTiles,
    #[comptime] kind: TileKind,
) -> MainloopOutput<NO> {
    let masking = &scoring.masking;
    let tile = &assigned_tile.tile;
    let tile_position = tile_position(tile);
    let negative_infinity = scoring.arguments.negative_infinity;
    let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
    let query_operand = uniform(descriptor(offsets.queries));
    let key_operand =
        descriptor(offsets.stages + warpgroup * comptime!(WgmmaSplitDTiles::HALF_BYTES as u32));
    let value_operand = transposed_descriptor(
        offsets.stages,
        comptime!(WgmmaSplitDTiles::VALUE_KEYS * ROW_BYTES),
    );

    let mut o = Vector::<f32, NO>::zeroed();
    let mut softmax_state = empty_state(negative_infinity);
    let mut count = uniform(visited);
    barrier_wait(offsets.queries_full, queries_parity);
    if assigned_tile.first < tile.end_block {
        let first_queries = load_first_queries::<NQ>(offsets.queries, tiles);
        let mut block = assigned_tile.first;
        // `passed` counts the chunks that have passed through the ring so far. This count determines the stage
        // (shared-memory buffer) of the next chunk.
        let first_chunk = count * comptime!((tiles.key_chunks() + tiles.value_chunks()) as u32);
        let mut passed = first_chunk + comptime!(tiles.key_chunks() as u32);
        let started = multiply_chunked_scores::<NS, NQ>(
            first_queries,
            query_operand,
            key_operand,
            ring,
            pipeline_state(first_chunk, tiles.stages),
            tiles,
        );
        let seen = block_mask(
            &tile_position,
            rows,
            block,
            warpgroup * comptime!((HALF_KEYS / 32) as u32),
            masking,
            WgmmaSplitDTiles::KEYS,
            HALF_KEYS,
            kind,
        );
        let biases = bias_words::<F, NB>(
            scoring,
            rows,
            block * comptime!(WgmmaSplitDTiles::KEYS as i32)
                + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
            HALF_KEYS,
            kind.fragment,
        );
        let s = take_fragment::<NS>(started, HALF_KEYS / 2, HALF_KEYS / 2, 0usize);
        free_chunk(
            offsets.empty + 8u32 * pipeline_state(passed - 1u32, tiles.stages).stage,
            ring.elected,
            0usize,
            1usize,
        );
        let s = score::<F, NB, NS>(
            s,
            block * comptime!(WgmmaSplitDTiles::KEYS as i32)
                + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
            &seen,
            rows,
            biases,
            scoring,
            HALF_KEYS,
            kind.fragment,
        );
        softmax_state = softmax::<F, NB, NS>(
            s,
            block * comptime!(WgmmaSplitDTiles::KEYS as i32)
                + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
            rows,
            scoring,
            softmax_state,
            scale_log2,
            offsets,
            ring,
            0u32,
            count,
            false,
            tiles,
            kind,
        );
        // The softmax of the first block needs no rescale of O, because O is still 0.
        softmax_state.moved = false.runtime();
        softmax_state.factor = pair(1.0f32, 1.0f32);

        let mut next = next_block(tile, block + 1i32, masking, kind);
        while next < tile.end_block {
            let started = multiply_chunked_scores::<NS, NQ>(
                first_queries,
                query_operand,
                key_operand,
                ring,
                pipeline_state(passed, tiles.stages),
                tiles,
            );
            passed += comptime!(tiles.key_chunks() as u32);
            let key_empty =
                offsets.empty + 8u32 * pipeline_state(passed - 1u32, tiles.stages).stage;
            o = rescale::<NO>(
                o,
                softmax_state.moved,
                softmax_state.factor,
                comptime!(tiles.value_columns()),
            );
            named_barrier(PROBABILITIES, CONSUMERS);
            share_first_chunk(ring, passed, tiles);
            let cleaned = zero_fill_values(
                offsets,
                tile,
                zeros_from(&masking.seq_lens, kind),
                block,
                count,
                passed,
                key_empty,
                ring,
                tiles,
                kind,
            );
            o = multiply_chunked_output::<NO>(
                o,
                probabilities(offsets, count),
                value_operand,
                ring,
                pipeline_state(passed + warpgroup, tiles.stages),
                key_empty,
                select(cleaned, 0u32, ring.elected),
                tiles,
            );
            free_own_first_chunk(ring, passed, tiles);
            let seen = block_mask(
                &tile_position,
                rows,
                next,
                warpgroup * comptime!((HALF_KEYS / 32) as u32),
                masking,
                WgmmaSplitDTiles::KEYS,
                HALF_KEYS,
                kind,
            );
            let biases = bias_words::<F, NB>(
                scoring,
                rows,
                next * comptime!(WgmmaSplitDTiles::KEYS as i32)
                    + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
                HALF_KEYS,
                kind.fragment,
            );
            let s = take_fragment::<NS>(started, HALF_KEYS / 2, HALF_KEYS / 2, OWN_CHUNKS);
            let s = score::<F, NB, NS>(
                s,
                next * comptime!(WgmmaSplitDTiles::KEYS as i32)
                    + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
                &seen,
                rows,
                biases,
                scoring,
                HALF_KEYS,
                kind.fragment,
            );
            softmax_state = softmax::<F, NB, NS>(
                s,
                next * comptime!(WgmmaSplitDTiles::KEYS as i32)
                    + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
                rows,
                scoring,
                softmax_state,
                scale_log2,
                offsets,
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
                offsets.empty,
                ring,
                passed + warpgroup,
                3usize,
                0usize,
                tiles,
            );
            passed += comptime!(tiles.value_chunks() as u32);
            block = next;
            count += 1u32;
            next = next_block(tile, block + 1i32, masking, kind);
        }
        o = rescale::<NO>(
            o,
            softmax_state.moved,
            softmax_state.factor,
            comptime!(tiles.value_columns()),
        );
        named_barrier(PROBABILITIES, CONSUMERS);
        share_first_chunk(ring, passed, tiles);
        zero_fill_values(
            offsets,
            tile,
            zeros_from(&masking.seq_lens, kind),
            block,
            count,
            passed,
            offsets.empty,
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
            probabilities(offsets, count),
            value_operand,
            ring,
            pipeline_state(passed + warpgroup, tiles.stages),
            offsets.empty,
            0u32,
            tiles,
        );
        free_own_first_chunk(ring, passed, tiles);
        o = take_fragment::<NO>(
            o,
            comptime!(tiles.value_columns() / 2),
            comptime!(tiles.output_fragment()),
            0usize,
        );
        #[unroll]
        for own in comptime!(usize::from(tiles.frees_first_chunk_at_once()))..OWN_CHUNKS {
            free_values(offsets.empty, ring, passed + warpgroup, own, 0usize, tiles);
        }
        count += 1u32;
    }

    // Each warpgroup has summed P over its own keys only, so the warpgroups exchange their row sums. The exchange
    // overwrites the row maxima in shared memory. Both warpgroups must therefore have read these maxima before the
    // exchange.
    let sums = quad_sum(softmax_state.sums);
    named_barrier(MAXIMA, CONSUMERS);
    MainloopOutput::<NO> {
        finished: Finished::<NO> {
            o,
            reference: softmax_state.row_max.reference,
            sums: exchange(offsets, sums, (count + 1u32) % 2u32, false),
        },
        visited: count,
    }
}
