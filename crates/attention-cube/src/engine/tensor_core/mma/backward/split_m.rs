//! The split-M backward, for head sizes up to 128. Each warp has 16 or 32 rows of the tile, which are queries or keys.
//! The warp computes all columns of the gradients of these rows.
//!
//! Tensors. For dQ, the kernel keeps a tile of Q and dO, and streams blocks of K and V. For dK and dV, the kernel keeps a
//! tile of K and V, and streams blocks of Q and dO.
//!
//! - Queries and their gradient `[batch, q_heads, q_len, head_dim]`.
//! - Output gradients `[batch, q_heads, q_len, value_dim]`.
//! - Keys and their gradient `[batch, kv_heads, kv_len, head_dim]`.
//! - Values and their gradient `[batch, kv_heads, kv_len, value_dim]`.
//! - LSE and delta `[batch, q_heads, 5, padded q_len]`, f32. Row 0 of a head holds the LSE, row 1 delta. If every LSE
//!   is stored as two f32, row 0 holds only the row maximum, and row 2 the logarithm of the row sum. Otherwise, a query
//!   is *far* if one f32 cannot hold its LSE precisely enough. For a far query, row 0 holds a marker value, row 2 the
//!   logarithm of the row sum, and row 3 the row maximum. Row 4 holds one flag per group of queries. The flag tells
//!   whether the group has a far query.
//! - Gradients of several splits `[splits · batch, heads, len, dim]`, f32.
//!
//! Budget. Shared memory ([`MmaGradientSplitMTiles::shared_memory`]) holds the tile's rows, and two blocks of the streamed
//! operands with LSE and delta. The register counts are for head size 128, 16 keys per warp and blocks of 64 queries. A
//! thread uses 128 registers for the two gradients, 32 for S and 32 for dP. P and dS, packed from S and dP, take 16 registers
//! each.
//!
//! Bound. On data-center GPUs, which have fast tensor cores, the bandwidth of shared memory limits the kernel. For S, a
//! warp of 16 rows reads 4 KB of the tile and 16 KB of a block. For dP, the warp reads as many bytes, and for each
//! gradient 16 KB. If the kernel computes only one gradient, warps have 32 rows, and each read of a block serves twice
//! as many `mma`. Even with 32 rows, shared memory is the limit.
//!
//! Schedule. Each CTA has one tile. All warps copy operands. While the warps multiply one block, the copies of the next
//! block are in flight. The CTA passes one barrier per block. After the barrier, all warps have read the previous
//! block, and the copies of the current block have completed. Between two barriers the warps do not synchronize, so one
//! warp multiplies while another computes P and dS. For each block, a warp does these steps: start the GEMMs of S and
//! dP, start the copies of the next block, compute P and dS, then compute both gradient GEMMs. If the GEMM for dV came
//! before dP, ptxas would move dP ahead of that GEMM and spill registers.

mod blocks;
mod p_ds;

use self::blocks::{copy_block, copy_stationary};
use self::p_ds::compute_p_ds;
use super::part::{Part, alike, lse_delta_of_warp, seen_by_warp};
use crate::engine::tensor_core::common::dropout::{times_kept, value_factor};
use crate::engine::tensor_core::common::gradient::p_scale;
use crate::engine::tensor_core::common::output::{OutputPart, without_blind};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::scoring::{GradientGrid, GradientOperands};
use crate::engine::tensor_core::common::stationary_tile::{
    Stationary, Visit, first_visit, row_factors, stationary_tile_split, stationary_work_tile,
    visit_from, write_gradient_rows,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::fragments::{fragment_of, used_by_warp};
use crate::engine::tensor_core::mma::plan::MmaGradientSplitMTiles;
use crate::math::side::Side;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::cp_async::{await_copies, commit_copies};
use cube_kit::ampere::mma::{Scores, Sums, add_product, left_address, right_address, scores};
use cube_kit::nvidia::accumulator::pair;
use cube_kit::nvidia::ptx::{shared_address, uniform};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn backward_split_m<
    E: Float,
    G: Float,
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
    inputs: GradientOperands<E>,
    scoring: Scoring<F, NB>,
    dot_gradient: &mut Tensor<Vector<G, N>>,
    value_gradient: &mut Tensor<Vector<G, N>>,
    work: GradientGrid,
    #[comptime] tiles: MmaGradientSplitMTiles,
    #[comptime] kind: TileKind,
    #[define(E, G, F)] _elements: [ElemType; 3],
    #[define(N, NB, NS, NP, ND, NV, AS, AP, AD, AV)] _sizes: [usize; 10],
) {
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
    let index = CUBE_POS as u32;
    if index < work.grid.cubes {
        let work_tile = stationary_work_tile(&work.grid, index, kind.fragment.side);
        let tile = stationary_tile_split(
            work_tile,
            &work.grid,
            masking,
            work.group,
            comptime!(tiles.rows()),
            tiles.columns,
            kind,
        );
        let tile = alike(tile);
        let first = first_visit(&tile, masking, kind);
        if first.head < tile.heads {
            copy_stationary::<E>(
                &inputs.stationary_qk,
                &inputs.stationary_v_do,
                &tile,
                start,
                tiles,
            );
        }
        let warp_row = uniform(UNIT_POS / 32u32) * comptime!(tiles.warp_rows() as u32);
        // `row` is the tile row of the element in the thread's first register.
        let row = (warp_row + UNIT_POS % 32u32 / 4u32) as i32;
        let sums = sum::<E, F, NB, NS, NP, AS, AP, AD, AV>(
            &inputs.q_or_k,
            &inputs.v_or_do,
            &inputs.lse_delta,
            &tile,
            first,
            warp_row,
            row,
            &scoring,
            start,
            tiles,
            kind,
        );
        #[unroll]
        for fragment in 0..tiles.fragments {
            let row = row + comptime!((fragment * FRAGMENT_ROWS) as i32);
            if comptime!(tiles.sums.has_q_or_k()) {
                let factors = row_factors(
                    &inputs.lse_delta,
                    &tile,
                    row,
                    &masking.seq_lens,
                    times_kept(scoring.arguments.scale, &scoring.dropout),
                    kind.fragment,
                );
                let own = fragment_of::<AD, ND>(sums.q_or_k, fragment);
                let own = if comptime!(tiles.side == Side::Queries) {
                    without_blind::<ND>(own, factors, comptime!(tiles.dot_columns()))
                } else {
                    own
                };
                write_gradient_rows::<G, N, ND>(
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
                let factor = value_factor(&scoring.dropout, comptime!(p_scale(tiles.half)));
                let part = OutputPart::<NV> {
                    o: fragment_of::<AV, NV>(sums.v_or_do, fragment),
                    factors: pair(factor, factor),
                };
                write_gradient_rows::<G, N, NV>(
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

/// A warp's accumulated gradients. Each compiled kernel computes the gradient of Q or K, the gradient of V, or both.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Gradients<AD: Size, AV: Size> {
    q_or_k: Vector<f32, AD>,
    v_or_do: Vector<f32, AV>,
}

/// Runs the main loop over the blocks that the tile sees, starting at block `first`.
#[cube]
fn sum<E: Float, F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size, AD: Size, AV: Size>(
    q_or_k: &Tensor<E>,
    v_or_do: &Tensor<E>,
    lse_delta: &Tensor<f32>,
    tile: &Stationary,
    first: Visit,
    warp_row: u32,
    row: i32,
    scoring: &Scoring<F, NB>,
    start: u32,
    #[comptime] tiles: MmaGradientSplitMTiles,
    #[comptime] kind: TileKind,
) -> Gradients<AD, AV> {
    let masking = &scoring.masking;
    let blocks = start + comptime!(tiles.blocks_at() as u32);
    let stationary_qk = left_address(start, warp_row);
    let stationary_v_do = stationary_qk + comptime!(tiles.stationary_values_at() as u32);
    // For S and dP, a block's rows are the columns of the right operand. For the gradient GEMMs, the block's rows are
    // the rows of the right operand.
    let scored_at = right_address(blocks);
    let summed_at = left_address(blocks, 0u32);
    let to_values = comptime!(tiles.block_values_at() as u32);

    let part = comptime!(Part {
        fragments: tiles.fragments,
        columns: tiles.columns,
        block: tiles.columns,
    });
    let row_lse_delta =
        lse_delta_of_warp(lse_delta, tile, row, &masking.seq_lens, part, kind.fragment);
    let mut dot_sums = Vector::<f32, AD>::zeroed();
    let mut value_sums = Vector::<f32, AV>::zeroed();
    let mut head = first.head;
    let mut block = first.block;
    // `stage` is the byte offset from `blocks` to the buffer of the current block.
    let mut stage = 0u32;
    if head < tile.heads {
        copy_block::<E>(q_or_k, v_or_do, lse_delta, tile, head, block, blocks, tiles);
        commit_copies();
    }
    while head < tile.heads {
        let next = visit_from(tile, head, block + 1i32, masking, kind);
        let other = comptime!(tiles.block_bytes() as u32) - stage;
        await_copies(0usize);
        sync_cube();
        let seen = seen_by_warp::<F, NB>(tile, row, head, block, 0u32, scoring, part, kind);
        let lse_delta_at = blocks + stage + comptime!(tiles.block_lse_delta_at() as u32);
        let s = scores::<AS>(
            stationary_qk,
            scored_at + stage,
            comptime!(score_product(tiles, tiles.head_dim)),
        );
        let dp = if comptime!(tiles.sums.has_q_or_k()) {
            scores::<AS>(
                stationary_v_do,
                scored_at + stage + to_values,
                comptime!(score_product(tiles, tiles.value_dim)),
            )
        } else {
            s
        };
        // Start the copies after the GEMMs of S and dP, so that the `mma` instructions hide the latency of the address
        // computation.
        if next.head < tile.heads {
            copy_block::<E>(
                q_or_k,
                v_or_do,
                lse_delta,
                tile,
                next.head,
                next.block,
                blocks + other,
                tiles,
            );
        }
        commit_copies();
        let made = compute_p_ds::<F, NB, NS, NP, AS, AP>(
            s,
            dp,
            &seen,
            &row_lse_delta,
            lse_delta_at,
            block,
            scoring,
            tiles,
            kind.fragment,
        );
        let may_have_masked = seen.first.block_mask.may_have_masked;
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
        if comptime!(tiles.sums.has_q_or_k()) {
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
        q_or_k: dot_sums,
        v_or_do: value_sums,
    }
}

/// Multiplies `left` (P or dS) by a block's rows at address `right`, and adds the product to `sums`. If
/// `may_have_masked`, some block rows may be hidden from the whole tile. Such a row may hold NaN, and `0 · NaN` is NaN.
/// In this case, the GEMM reads a block row as zeros if the matching column of the warp's `left` has only zeros.
#[cube]
fn with_block<A: Size, AP: Size>(
    sums: Vector<f32, A>,
    left: Vector<u32, AP>,
    right: u32,
    may_have_masked: bool,
    #[comptime] columns: usize,
    #[comptime] tiles: MmaGradientSplitMTiles,
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

/// The sizes of the GEMM for S or dP. `depth` is the number of columns of its operands.
const fn score_product(tiles: MmaGradientSplitMTiles, depth: usize) -> Scores {
    Scores {
        fragments: tiles.fragments,
        columns: tiles.columns,
        depth,
        left_rows: tiles.rows(),
        right_rows: tiles.columns,
        half: tiles.half,
    }
}

/// The sizes of the gradient GEMM, which multiplies P or dS by a block and adds the product to a gradient. The gradient
/// has `columns` columns.
const fn sum_product(tiles: MmaGradientSplitMTiles, columns: usize, masked: bool) -> Sums {
    Sums {
        fragments: tiles.fragments,
        columns,
        depth: tiles.columns,
        right_rows: tiles.columns,
        masked,
        half: tiles.half,
    }
}
