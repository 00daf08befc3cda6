//! A warpgroup passes over a tile's blocks.

use super::halves::{
    exchange, free_own_first_chunk, free_values, probabilities, share_first_chunk, softmax,
};
use super::producer::Places;
use super::zero_fill::zero_fill_values;
use super::{CONSUMERS, HALF_KEYS, MAXIMA, OWN_CHUNKS, PROBABILITIES};
use crate::engine::wgmma::chunked::{
    Ring, load_first_queries, multiply_chunked_output, multiply_chunked_scores,
};
use crate::engine::wgmma::plan::SplitDTiles;
use crate::fragment::RowPair;
use crate::fragment::bias::bias_words;
use crate::fragment::output::Finished;
use crate::fragment::score::score;
use crate::fragment::scoring::Scoring;
use crate::fragment::softmax::{empty_state, rescale, totals};
use crate::fragment::view::view;
use crate::fragment::visits::{next_block, tile_position};
use crate::fragment::work_tile::{AssignedTile, TileKind};
use cube_kit::hopper::accumulator::pair;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_wait, named_barrier, uniform};
use cube_kit::hopper::wgmma::{descriptor, free_chunk, take_fragment, transposed_descriptor};
use cube_kit::hopper::{ROW_BYTES, WARPGROUP};
use cubecl::prelude::*;

/// A tile's part of a warpgroup, and the blocks that the cube has visited.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Attended<NO: Size> {
    pub finished: Finished<NO>,
    pub visited: u32,
}

/// Visits a tile's blocks, after `visited` blocks of other tiles.
#[cube]
pub(super) fn attend<F: Float, NB: Size, NS: Size, NQ: Size, NO: Size>(
    assigned_tile: &AssignedTile,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    places: &Places,
    ring: Ring,
    queries_parity: u32,
    visited: u32,
    power: f32,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) -> Attended<NO> {
    let masking = &scoring.masking;
    let tile = &assigned_tile.tile;
    let tile_position = tile_position(tile);
    let negative_infinity = scoring.arguments.negative_infinity;
    let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
    let query_operand = uniform(descriptor(places.queries));
    let key_operand =
        descriptor(places.stages + warpgroup * comptime!(SplitDTiles::HALF_BYTES as u32));
    let value_operand = transposed_descriptor(
        places.stages,
        comptime!(SplitDTiles::VALUE_KEYS * ROW_BYTES),
    );

    let mut o = Vector::<f32, NO>::zeroed();
    let mut softmax_state = empty_state(negative_infinity);
    let mut count = uniform(visited);
    barrier_wait(places.queries_full, queries_parity);
    if assigned_tile.first < tile.end_block {
        let first_queries = load_first_queries::<NQ>(places.queries, tiles);
        let mut block = assigned_tile.first;
        // Chunks that went through the ring.
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
        let seen = view(
            &tile_position,
            rows,
            block,
            warpgroup * comptime!((HALF_KEYS / 32) as u32),
            masking,
            SplitDTiles::KEYS,
            HALF_KEYS,
            kind,
        );
        let biases = bias_words::<F, NB>(
            scoring,
            rows,
            block * comptime!(SplitDTiles::KEYS as i32)
                + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
            HALF_KEYS,
            kind.fragment,
        );
        let s = take_fragment::<NS>(started, HALF_KEYS / 2, HALF_KEYS / 2, 0usize);
        free_chunk(
            places.empty + 8u32 * pipeline_state(passed - 1u32, tiles.stages).stage,
            ring.elected,
            0usize,
            1usize,
        );
        let s = score::<F, NB, NS>(
            s,
            block * comptime!(SplitDTiles::KEYS as i32)
                + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
            &seen,
            rows,
            biases,
            scoring,
            HALF_KEYS,
            kind.fragment,
        );
        softmax_state = softmax::<NS>(
            s,
            softmax_state,
            power,
            negative_infinity,
            places,
            ring,
            0u32,
            count,
            false,
            tiles,
            kind,
        );
        // There is no older output yet.
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
            let key_empty = places.empty + 8u32 * pipeline_state(passed - 1u32, tiles.stages).stage;
            o = rescale::<NO>(
                o,
                softmax_state.moved,
                softmax_state.factor,
                comptime!(tiles.value_columns()),
            );
            named_barrier(PROBABILITIES, CONSUMERS);
            share_first_chunk(ring, passed, tiles);
            let cleaned = zero_fill_values(
                places,
                tile,
                &masking.extent,
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
                probabilities(places, count),
                value_operand,
                ring,
                pipeline_state(passed + warpgroup, tiles.stages),
                key_empty,
                select(cleaned, 0u32, ring.elected),
                tiles,
            );
            free_own_first_chunk(ring, passed, tiles);
            let seen = view(
                &tile_position,
                rows,
                next,
                warpgroup * comptime!((HALF_KEYS / 32) as u32),
                masking,
                SplitDTiles::KEYS,
                HALF_KEYS,
                kind,
            );
            let biases = bias_words::<F, NB>(
                scoring,
                rows,
                next * comptime!(SplitDTiles::KEYS as i32)
                    + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
                HALF_KEYS,
                kind.fragment,
            );
            let s = take_fragment::<NS>(started, HALF_KEYS / 2, HALF_KEYS / 2, OWN_CHUNKS);
            let s = score::<F, NB, NS>(
                s,
                next * comptime!(SplitDTiles::KEYS as i32)
                    + (warpgroup * comptime!(HALF_KEYS as u32)) as i32,
                &seen,
                rows,
                biases,
                scoring,
                HALF_KEYS,
                kind.fragment,
            );
            softmax_state = softmax::<NS>(
                s,
                softmax_state,
                power,
                negative_infinity,
                places,
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
            places,
            tile,
            &masking.extent,
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
            probabilities(places, count),
            value_operand,
            ring,
            pipeline_state(passed + warpgroup, tiles.stages),
            places.empty,
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
            free_values(places.empty, ring, passed + warpgroup, own, 0usize, tiles);
        }
        count += 1u32;
    }

    // Each warpgroup has summed over its own keys. The last maxima went through the other buffer or have
    // been read by both.
    let sums = totals(softmax_state.sums);
    named_barrier(MAXIMA, CONSUMERS);
    Attended::<NO> {
        finished: Finished::<NO> {
            o,
            reference: softmax_state.row_max.reference,
            sums: exchange(places, sums, (count + 1u32) % 2u32, false),
        },
        visited: count,
    }
}
