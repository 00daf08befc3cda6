//! The bias gradient on tensor cores: dBias = Σ dS with dS = P ∘ (dP − Δ). The sum runs over the dimensions along which
//! the bias is broadcast.
//!
//! Algorithm. A CTA computes the gradient of one bias tile: the biases of a range of queries and a range of keys. If
//! the bias is broadcast, the forward adds this bias tile to the scores of several query tiles. The CTA loops over
//! these query tiles, or over a part of them if several CTAs share the bias tile. Each iteration computes S = Q·Kᵀ, P
//! from the saved logsumexp, and dP = dO·Vᵀ, and adds dS to f32 sums in registers. At the end, the CTA writes the
//! summed tile. The order of the iterations is fixed and there are no atomics, so results are bitwise equal in every
//! run. Half-precision biases are read once, before the loop.
//!
//! Tensors. Q `[batch, q_heads, q_len, head_dim]`, dO `[batch, q_heads, q_len, value_dim]`, K
//! `[batch, kv_heads, kv_len, head_dim]`, V `[batch, kv_heads, kv_len, value_dim]`. LSE and delta are
//! `[batch, q_heads, 5, padded q_len]`. The kernel reads the first three of the five rows: row maximum, delta, and
//! logarithm of the row sum. The gradient has the bias's shape. If several CTAs share a tile, their partial gradients
//! are `[splits · batch, heads, queries, keys]` in f32.
//!
//! Budget ([`BiasGradientTiles`]). Q, K, dO and V are copied in chunks of 64 columns. Shared memory holds three stages,
//! each with a chunk of Q and K, or of dO and V. For 64 × 64 tiles, the stages take 48 KB at any head size. A thread
//! uses 32 registers for S (later P), 32 for dP, 32 for the sums and 16 for the biases. Three CTAs share a
//! multiprocessor.
//!
//! Schedule. All warps copy operands. The copies of a chunk start two chunks ahead, even across iterations. One CTA
//! barrier per chunk separates the reads of a stage from the copies that overwrite the stage. The kernel skips query
//! tiles that see no key of the CTA's key tile.
//!
//! Bound. The kernel computes two GEMMs over all scores, while the rest of the backward computes seven. At small head
//! sizes, the exponentials and the reads of the bias limit the kernel's speed.

mod biases;
mod block_range;
pub(crate) mod diagonals;
mod gradients;
mod load;
mod output;

use self::biases::biases_of_warp;
use self::block_range::{Visits, key_tile_of, next_visit, tile_of};
use self::gradients::{probabilities, with_gradients};
use self::load::{Operands, copy_chunk, operands};
use self::output::{sum_of_queries, write_row_of_keys};
use super::part::{Part, alike, lse_delta_of_warp, seen_by_warp};
use crate::auxiliary::bias_gradient::scores::Broadcast;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::fragments::fragment_of;
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use crate::math::rounding::rounded_vector;
use crate::math::schedule::{Grid, block_count, work_tile};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::cp_async::{await_copies, commit_copies};
use cube_kit::ampere::mma::{Scores, add_scores, left_address, right_address, scores};
use cube_kit::nvidia::ptx::{shared_address, uniform};
use cubecl::prelude::*;

/// The input tensors of the bias gradient kernel.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BiasGradientOperands<E: Float> {
    /// The query, `[batch, q_heads, q_len, head_dim]`.
    pub query: OwnedTensor<E>,
    /// The key, `[batch, kv_heads, kv_len, head_dim]`.
    pub key: OwnedTensor<E>,
    /// The value, `[batch, kv_heads, kv_len, value_dim]`.
    pub value: OwnedTensor<E>,
    /// The output's gradient, `[batch, q_heads, q_len, value_dim]`.
    pub output_gradient: OwnedTensor<E>,
    /// LSE and delta of each query, `[batch, q_heads, 5, padded q_len]`. The kernel reads rows 0 to 2: row maximum, delta,
    /// and logarithm of the row sum.
    pub lse_delta: OwnedTensor<f32>,
}

/// The launch grid of the bias tiles.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct BiasGrid {
    pub grid: Grid,
    pub batches: u32,
    pub q_heads: u32,
    /// The number of query heads per KV head (the GQA group size).
    pub group: u32,
    /// The number of key tiles of the bias: `kv_len` divided by the number of keys per tile, rounded up.
    pub key_tiles: u32,
}

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
    inputs: BiasGradientOperands<E>,
    scoring: Scoring<F, NB>,
    gradient: &mut Tensor<Vector<G, NG>>,
    bias_grid: BiasGrid,
    #[comptime] broadcast: Broadcast,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: TileKind,
    #[define(E, F, G)] _elements: [ElemType; 3],
    #[define(NB, NG, NS, NP, AS)] _sizes: [usize; 5],
) {
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
    let index = CUBE_POS as u32;
    if index < bias_grid.grid.cubes {
        // The launch grid covers tiles, heads and batches of the bias. A broadcast dimension of the bias has size 1.
        let own = work_tile(&bias_grid.grid, index, false);
        let mut query_tiles = 1u32;
        if comptime!(broadcast.queries) {
            query_tiles = block_count(
                scoring.masking.seq_lens.q_len,
                comptime!(tiles.rows() as i32),
            ) as u32;
        }
        let mut heads = 1u32;
        if comptime!(broadcast.heads) {
            heads = bias_grid.q_heads;
        }
        let mut count = query_tiles * heads;
        if comptime!(broadcast.batch) {
            count *= bias_grid.batches;
        }
        let visits = Visits {
            query_tile: own.tile / bias_grid.key_tiles,
            key_tile: (own.tile % bias_grid.key_tiles) as i32,
            head: own.head,
            batch: own.batch,
            query_tiles,
            heads,
            group: bias_grid.group,
            count,
            step: bias_grid.grid.splits,
            along_diagonal: false,
        };
        let operands = operands::<E>(
            &inputs.query,
            &inputs.key,
            &inputs.value,
            &inputs.output_gradient,
        );
        let warp_row = uniform(UNIT_POS / 32u32) * comptime!(tiles.warp_rows() as u32);
        let sums = sum_visits::<E, F, NB, NS, NP, AS>(
            &operands,
            &inputs.lse_delta,
            &visits,
            own.split,
            warp_row,
            &scoring,
            start,
            tiles,
            kind,
        );

        let part = own.split * (bias_grid.grid.planes / bias_grid.grid.heads) + own.batch;
        let base = part as usize * gradient.stride(0) + own.head as usize * gradient.stride(1);
        let first_key = visits.key_tile * comptime!(tiles.columns as i32);
        if comptime!(broadcast.queries) {
            let sum = sum_of_queries::<AS>(sums, start, tiles);
            let key = first_key + UNIT_POS as i32;
            if UNIT_POS < comptime!(tiles.columns as u32) && key < scoring.masking.seq_lens.kv_len {
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
                    if position < scoring.masking.seq_lens.q_len {
                        let row = base + position as usize * gradient.stride(2);
                        write_row_of_keys::<G, NG, NS>(
                            own,
                            gradient,
                            row,
                            first_key,
                            scoring.masking.seq_lens.kv_len,
                            second,
                            tiles.columns,
                        );
                    }
                }
            }
        }
    }
}

/// If the bias is broadcast, several query tiles use the CTA's bias tile. The work on each of these query tiles is one
/// *visit*. The function sums dS over all visits of the CTA, starting with visit number `first`. The visits may also
/// follow a diagonal of tiles (see [`diagonals`]).
#[cube]
fn sum_visits<E: Float, F: Float, NB: Size, NS: Size, NP: Size, AS: Size>(
    operands: &Operands<'_, '_, '_, '_, E>,
    lse_delta: &Tensor<f32>,
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
    // `stage` is the address of the shared-memory buffer that holds the next chunk to multiply. At the next barrier,
    // all warps have read the buffer of the previous chunk. After the barrier, the CTA may therefore refill the
    // previous chunk's buffer.
    let mut stage = start;
    if visit < visits.count {
        let tile = alike(tile_of(visits, visit, masking, tiles, kind));
        let key_tile = key_tile_of(visits, visit);
        copy_chunk::<E>(operands, &tile, key_tile, start, 0usize, tiles);
        commit_copies();
        copy_chunk::<E>(
            operands,
            &tile,
            key_tile,
            start + stage_bytes,
            1usize,
            tiles,
        );
        commit_copies();
    }
    comptime!(assert!(
        !(visits.along_diagonal && kind.fragment.reads_ahead()),
        "the tiles of a diagonal have different biases"
    ));
    // Load the biases once, since all query tiles of the CTA have the same biases. Along a diagonal, the kernel loads
    // biases later, and this call returns zeros. A CTA without query tiles loads the
    // biases of the last query tile that uses the bias tile, so that the loads stay inside the bias tensor.
    let any = tile_of(
        visits,
        min(first, visits.count - 1u32),
        masking,
        tiles,
        kind,
    );
    let biases = biases_of_warp::<F, NB>(&any, row, visits.key_tile, scoring, tiles, kind.fragment);
    while visit < visits.count {
        let tile = alike(tile_of(visits, visit, masking, tiles, kind));
        let key_tile = key_tile_of(visits, visit);
        let following = next_visit(visits, visit + visits.step, masking, tiles, kind);
        let follows = following < visits.count;
        let row_lse_delta = lse_delta_of_warp(
            lse_delta,
            &tile,
            row,
            &masking.seq_lens,
            part,
            kind.fragment,
        );
        let seen = seen_by_warp::<F, NB>(&tile, row, 0u32, key_tile, 0u32, scoring, part, kind);
        let mut s = Vector::<f32, AS>::zeroed();
        let mut w = Vector::<f32, AS>::zeroed();
        #[unroll]
        for chunk in 0..comptime!(tiles.chunks()) {
            await_copies(1usize);
            // After this barrier, all copies of this chunk have completed, and all warps have read the shared-memory buffer
            // of the previous chunk.
            sync_cube();
            let before = select(stage == start, end - stage_bytes, stage - stage_bytes);
            if comptime!(chunk + 2 < tiles.chunks()) {
                copy_chunk::<E>(
                    operands,
                    &tile,
                    key_tile,
                    before,
                    comptime!(chunk + 2),
                    tiles,
                );
            } else if follows {
                // Compute the position of the next query tile only here, because the registers cannot hold the positions of
                // two query tiles during a whole iteration.
                let next = alike(tile_of(visits, following, masking, tiles, kind));
                copy_chunk::<E>(
                    operands,
                    &next,
                    key_tile_of(visits, following),
                    before,
                    comptime!(chunk + 2 - tiles.chunks()),
                    tiles,
                );
            }
            commit_copies();
            if comptime!(chunk == tiles.dot_chunks()) {
                w = probabilities::<F, NB, NS, NP, AS>(
                    s,
                    &biases,
                    &seen,
                    &row_lse_delta,
                    key_tile,
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
        sums = with_gradients::<F, NB, NS, AS>(
            sums,
            w,
            s,
            &seen,
            &row_lse_delta,
            key_tile,
            scoring,
            visits.along_diagonal,
            tiles,
            kind,
        );
        visit = following;
    }
    await_copies(0usize);
    sums
}

/// The sizes of the GEMM over one chunk: Q·Kᵀ for the first chunks, dO·Vᵀ for the rest.
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
