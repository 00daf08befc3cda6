//! The bias gradient on matrix units, dBias = Σ P ∘ (dP − Δ) over the dimensions along which the bias is broadcast.
//!
//! Algorithm. A cube has a tile of queries × keys of the bias, and loops over the batches, heads and query tiles that share it.
//! For each of these it computes S = Q·Kᵀ, then P from the saved logsumexp, dP = dO·Vᵀ, and adds dS to sums in f32 registers.
//! The tile is written once. The order is fixed, and there are no atomics: every run gives the same bits.
//!
//! Tensors. Q `[batch, q_heads, q_len, head_dim]`, dO `[batch, q_heads, q_len, value_dim]`, K and V with `kv_heads` and `kv_len`;
//! terms `[batch, q_heads, 3, padded q_len]` (reference, delta, logarithm); the gradient has the bias's shape, or
//! `[splits · batch, heads, queries, keys]` in f32 where several cubes share a tile.
//!
//! Budget ([`BiasGradientTiles`]). Shared memory: three stages of 64 columns of both operands, 48 KB for 64 × 64 tiles, at any
//! head size. Registers a thread: 32 for S, which become P, 32 for dP and 32 for the sums; three cubes share a multiprocessor.
//!
//! Schedule. All warps copy. A chunk's copies start two chunks ahead, across visits, behind one barrier a chunk. Pairs of a query
//! tile and a key tile that do not see each other are skipped.
//!
//! Bound. Two products a score, where the rest of the backward has seven; at small head sizes the exponentials and the bias's reads.

mod copies;
mod gradients;
mod output;
mod visits;

use self::copies::{Operands, copy_chunk, operands};
use self::gradients::{probabilities, with_gradients};
use self::output::{sum_of_queries, write_row_of_keys};
use self::visits::{Visits, next_visit, tile_of};
use super::part::{Part, alike, seen_by_warp, terms_of_warp};
use crate::engine::mma::fragments::fragment_of;
use crate::engine::mma::plan::BiasGradientTiles;
use crate::fragment::scoring::{Scoring, scoring};
use crate::fragment::work_tile::TileKind;
use crate::math::rounding::rounded_vector;
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::ScoreArguments;
use crate::math::visibility::Extent;
use crate::passes::bias_gradient::scores::Broadcast;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::copy::{await_copies, commit_copies};
use cube_kit::ampere::product::{Scores, add_scores, left_address, right_address, scores};
use cube_kit::hopper::ptx::{shared_address, uniform};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn bias_gradient_split_m<
    E: Float,
    F: Float,
    G: Float,
    NB: Size,
    NG: Size,
    NS: Size,
    NP: Size,
    AS: Size,
>(
    query: &Tensor<E>,
    key: &Tensor<E>,
    value: &Tensor<E>,
    output_gradient: &Tensor<E>,
    terms: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<u32>>,
    bias: ComptimeOption<&Tensor<Vector<F, NB>>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    gradient: &mut Tensor<Vector<G, NG>>,
    grid: Grid,
    extent: Extent,
    arguments: ScoreArguments,
    mask_places: MaskPlaces,
    batches: u32,
    q_heads: u32,
    group: u32,
    key_tiles: u32,
    #[comptime] broadcast: Broadcast,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: TileKind,
    #[define(E)] _element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(G)] _gradient_element: ElemType,
    #[define(NB)] _bias_vector: usize,
    #[define(NG)] _gradient_vector: usize,
    #[define(NS, NP, AS)] _vectors: [usize; 3],
) {
    let scoring = scoring::<F, NB>(extent, lengths_and_ids, mask, mask_places, bias, arguments);
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
    let index = CUBE_POS as u32;
    if index < grid.cubes {
        // The grid counts tiles, heads and batches of the bias, which has 1 where it is broadcast.
        let own = work_tile(&grid, index, false);
        let mut query_tiles = 1u32;
        if comptime!(broadcast.queries) {
            query_tiles = block_count(extent.q_len, comptime!(tiles.rows() as i32)) as u32;
        }
        let mut heads = 1u32;
        if comptime!(broadcast.heads) {
            heads = q_heads;
        }
        let mut count = query_tiles * heads;
        if comptime!(broadcast.batch) {
            count *= batches;
        }
        let visits = Visits {
            query_tile: own.tile / key_tiles,
            key_tile: (own.tile % key_tiles) as i32,
            head: own.head,
            batch: own.batch,
            query_tiles,
            heads,
            group,
            count,
            step: grid.splits,
        };
        let operands = operands::<E>(query, key, value, output_gradient);
        let warp_row = uniform(UNIT_POS / 32u32) * comptime!(tiles.warp_rows() as u32);
        let sums = sum_visits::<E, F, NB, NS, NP, AS>(
            &operands, terms, &visits, own.split, warp_row, &scoring, start, tiles, kind,
        );

        let part = own.split * (grid.planes / grid.heads) + own.batch;
        let base = part as usize * gradient.stride(0) + own.head as usize * gradient.stride(1);
        let first_key = visits.key_tile * comptime!(tiles.columns as i32);
        if comptime!(broadcast.queries) {
            let sum = sum_of_queries::<AS>(sums, start, tiles);
            let key = first_key + UNIT_POS as i32;
            if UNIT_POS < comptime!(tiles.columns as u32) && key < extent.kv_len {
                gradient[base + key as usize] =
                    rounded_vector::<G, NG>(Vector::<f32, NG>::new(sum));
            }
        } else {
            let first_query = (visits.query_tile * comptime!(tiles.rows() as u32)) as i32
                + (warp_row + UNIT_POS % 32u32 / 4u32) as i32;
            #[unroll]
            for fragment in 0..tiles.fragments {
                let own = fragment_of::<AS, NS>(sums, fragment);
                #[unroll]
                for second in 0..2usize {
                    let position =
                        first_query + comptime!((fragment * FRAGMENT_ROWS + 8 * second) as i32);
                    if position < extent.q_len {
                        let row = base + position as usize * gradient.stride(2);
                        write_row_of_keys::<G, NG, NS>(
                            own,
                            gradient,
                            row,
                            first_key,
                            extent.kv_len,
                            second,
                            tiles.columns,
                        );
                    }
                }
            }
        }
    }
}

/// Sums dS over the visits from the `first` on.
#[cube]
fn sum_visits<E: Float, F: Float, NB: Size, NS: Size, NP: Size, AS: Size>(
    operands: &Operands<'_, '_, '_, '_, E>,
    terms: &Tensor<f32>,
    visits: &Visits,
    first: u32,
    warp_row: u32,
    scoring: &Scoring<F, NB>,
    start: u32,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AS> {
    let masking = &scoring.masking;
    let stage_bytes = comptime!(tiles.stage_bytes() as u32);
    let end = start + comptime!(tiles.shared_memory() as u32);
    let part = comptime!(Part {
        fragments: tiles.fragments,
        columns: tiles.columns,
        block: tiles.columns,
    });
    let row = (warp_row + UNIT_POS % 32u32 / 4u32) as i32;
    let left = left_address(u32::new(0), warp_row);
    let right = right_address(u32::new(0)) + comptime!(tiles.key_rows_at() as u32);
    let mut sums = Vector::<f32, AS>::zeroed();
    let mut visit = next_visit(visits, first, masking, tiles, kind);
    // The stage that is read next; the last one before it is free.
    let mut stage = start;
    if visit < visits.count {
        let tile = alike(tile_of(visits, visit, masking, tiles, kind));
        copy_chunk::<E>(operands, &tile, visits.key_tile, start, 0usize, tiles);
        commit_copies();
        copy_chunk::<E>(
            operands,
            &tile,
            visits.key_tile,
            start + stage_bytes,
            1usize,
            tiles,
        );
        commit_copies();
    }
    while visit < visits.count {
        let tile = alike(tile_of(visits, visit, masking, tiles, kind));
        let following = next_visit(visits, visit + visits.step, masking, tiles, kind);
        let follows = following < visits.count;
        let row_terms = terms_of_warp(terms, &tile, row, &masking.extent, part, kind.fragment);
        let seen =
            seen_by_warp::<F, NB>(&tile, row, 0u32, visits.key_tile, 0u32, scoring, part, kind);
        let mut s = Vector::<f32, AS>::zeroed();
        let mut w = Vector::<f32, AS>::zeroed();
        #[unroll]
        for chunk in 0..comptime!(tiles.chunks()) {
            await_copies(1usize);
            // All copies of this chunk are there, and all warps have read the stage before it.
            sync_cube();
            let before = select(stage == start, end - stage_bytes, stage - stage_bytes);
            if comptime!(chunk + 2 < tiles.chunks()) {
                copy_chunk::<E>(
                    operands,
                    &tile,
                    visits.key_tile,
                    before,
                    comptime!(chunk + 2),
                    tiles,
                );
            } else if follows {
                // Made where its copies start: a thread has no registers for two tiles over the whole visit.
                let next = alike(tile_of(visits, following, masking, tiles, kind));
                copy_chunk::<E>(
                    operands,
                    &next,
                    visits.key_tile,
                    before,
                    comptime!(chunk + 2 - tiles.chunks()),
                    tiles,
                );
            }
            commit_copies();
            if comptime!(chunk == tiles.dot_chunks()) {
                w = probabilities::<F, NB, NS, NP, AS>(
                    s,
                    &seen,
                    &row_terms,
                    visits.key_tile,
                    scoring,
                    tiles,
                    kind,
                );
            }
            let product = comptime!(product(tiles, chunk));
            if comptime!(chunk == 0 || chunk == tiles.dot_chunks()) {
                s = scores::<AS>(left + stage, right + stage, product);
            } else {
                s = add_scores::<AS>(s, left + stage, right + stage, product);
            }
            stage = select(stage + stage_bytes == end, start, stage + stage_bytes);
        }
        sums = with_gradients::<AS>(sums, w, s, &row_terms, tiles);
        visit = following;
    }
    await_copies(0usize);
    sums
}

/// The product of a chunk of both operands.
const fn product(tiles: BiasGradientTiles, chunk: usize) -> Scores {
    let depth = if chunk < tiles.dot_chunks() {
        BiasGradientTiles::depth(tiles.head_dim, chunk)
    } else {
        BiasGradientTiles::depth(tiles.value_dim, chunk - tiles.dot_chunks())
    };
    Scores {
        fragments: tiles.fragments,
        columns: tiles.columns,
        depth,
        left_rows: tiles.rows(),
        right_rows: tiles.columns,
        half: tiles.half,
    }
}
