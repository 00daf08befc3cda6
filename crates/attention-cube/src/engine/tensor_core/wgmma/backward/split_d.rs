//! The split-D backward on Hopper, for head sizes up to 512. Two warpgroups compute the gradient of the same 64 rows, which
//! are queries or keys. Each warpgroup computes half of the gradient's columns.
//!
//! Algorithm. Each row of a streamed block gives one column of S. For each block, each warpgroup recomputes half of the
//! columns of S, and P from S and the LSE. For the same half of the columns, the warpgroup computes `dP = dO Vᵀ` and
//! `dS = P ∘ (dP − delta)`. The warpgroup stores dS (or P, in the kernel for dV) to shared memory, where both
//! warpgroups read it. Each warpgroup multiplies dS (or P) by the streamed operand, and adds the result to its half of
//! the gradient.
//!
//! Tensors (half precision unless noted):
//! - `stationary_qk` and `stationary_v_do`: Q and dO for a tile of queries, K and V for a tile of keys. `q_or_k` and
//!   `v_or_do`: the tensors whose blocks the kernel streams. All are `[batch, heads, len, dim]`.
//! - `summed`: the right operand of the gradient's GEMM, which is `q_or_k` for dQ and dK, and `v_or_do` for dV.
//! - `lse_delta` `[batch, q_heads, 5, padded q_len]`, f32. `auxiliary/delta/kernel.rs` lists the meaning of its 5 rows,
//!   which hold LSE and delta.
//! - Optional: bias, mask bits (u32), lengths and segment ids (i32).
//! - `gradient` `[splits · batch, heads, len, dim]`, f32 with splits.
//!
//! Budget. [`WgmmaGradientSplitDTiles::shared_memory`] at head size 512: 64 KB for `stationary_qk`, 64 KB for
//! `stationary_v_do`, a ring of 5 × 16 KB, and 16 KB for dS. Of the two stationary operands, the kernel for dV needs
//! only `stationary_qk`. The kernel for dV has a ring of 8 × 16 KB. Registers per thread: 128 for the gradient, 32 for
//! S, 32 for dP.
//!
//! Schedule. All blocks pass through one ring of *stages* in shared memory. Each block is cut into *chunks*, and a
//! chunk fills one stage. First come the chunks of `q_or_k` and `v_or_do`, with 64 columns each. Then come the chunks
//! of `summed`, with 32 rows each. One warpgroup uses the even chunks of `summed`, and the other the odd chunks. For
//! each block, the warpgroups do these steps:
//! 1. Compute S and dP. While the tensor cores finish dP, the warpgroup computes P and the weights (P times the slope
//!    of the softcap) from S.
//! 2. Store dS (or P) to shared memory for both warpgroups.
//! 3. Multiply dS (or P) by the chunks of `summed`, and add the result to the gradient.
//!
//! Bound. For a block of 128 rows, each GEMM takes the tensor cores 4 clocks times the head size: 2,048 clocks at head
//! size 512. The accesses to shared memory take about 0.9 times as long as the tensor cores. The ring loads 16 KB in
//! every 256 clocks, a rate that the L2 cache must sustain. Computing dS takes a tenth of the GEMMs' time. During this
//! tenth, the tensor cores are idle.

mod producer;

use self::producer::{SharedOffsets, fetch, offsets};
use crate::engine::tensor_core::common::block_mask::block_mask;
use crate::engine::tensor_core::common::columns_end;
use crate::engine::tensor_core::common::dropout::{keep_bits_ahead, times_kept, value_factor};
use crate::engine::tensor_core::common::far::voted;
use crate::engine::tensor_core::common::gradient::{
    dot_gradients, lse_delta_of_block, p_scale, weights,
};
use crate::engine::tensor_core::common::scoring::GradientGrid;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::stationary_tile::{
    Stationary, first_visit, lse_delta_of_tile, position_of, row_factors, stationary_rows,
    stationary_tile_split, stationary_work_tile, visit_from,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::backward::load::GradientMaps;
use crate::engine::tensor_core::wgmma::chunked_gemm::{Ring, add_chunks, multiply_chunks};
use crate::engine::tensor_core::wgmma::output::{OutputTarget, write_gradient};
use crate::engine::tensor_core::wgmma::plan::{WgmmaGradientSplitDTiles, WgmmaSplitDTiles};
use crate::engine::tensor_core::wgmma::zero_fill::{
    has_unseen, signal_used_keys, used_columns, used_words, zero_fill_unseen,
};
use crate::math::visibility::SeqLens;
use cube_kit::hopper::barriers::warpgroup_barrier;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{
    async_proxy_fence, barrier_init_fence, barrier_wait, setmaxnreg_dec, setmaxnreg_inc,
    store_matrices,
};
use cube_kit::hopper::tma::await_stores;
use cube_kit::hopper::wgmma::{
    descriptor, free_chunk, matrix_row, take_fragment, transposed_descriptor,
};
use cube_kit::hopper::{PRODUCT_ROWS, WARPGROUP};
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::mbarrier::barrier_init;
use cube_kit::nvidia::ptx::{named_barrier, shared_address, store_shared, uniform};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The number of columns of S that a warpgroup computes per block.
const HALF_COLUMNS: usize = WgmmaGradientSplitDTiles::COLUMNS / 2;

/// The number of threads in the consumer warpgroups.
const CONSUMERS: usize = WgmmaSplitDTiles::WARPGROUPS * WARPGROUP;

/// The number of chunks of `summed` that each warpgroup multiplies per block. `summed` is the right operand of the
/// gradient GEMM. Each of its chunks has 32 rows.
const OWN_CHUNKS: usize = WgmmaGradientSplitDTiles::COLUMNS / WgmmaSplitDTiles::VALUE_KEYS;

/// The named barrier at which the two consumer warpgroups wait for each other, twice per block. After the first wait,
/// both warpgroups have read the previous dS (or P). After the second wait, both have written the next dS (or P).
const CONSUMER_BARRIER: u32 = 1;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn backward_split_d<
    E: Float,
    G: Float,
    F: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NP: Size,
    NG: Size,
>(
    maps: GradientMaps<E>,
    lse_delta: &Tensor<f32>,
    scoring: Scoring<F, NB>,
    gradient: &mut Tensor<Vector<G, N>>,
    work: GradientGrid,
    #[comptime] tiles: WgmmaGradientSplitDTiles,
    #[comptime] kind: TileKind,
    #[define(E, G, F)] _elements: [ElemType; 3],
    #[define(N, NB, NS, NP, NG)] _sizes: [usize; 5],
) {
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let offsets = offsets(shared_address(&memory), tiles);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(offsets.full + at, 1usize);
            // The empty barrier expects 8 arrivals, because each of the 8 consumer warps arrives for every chunk. A
            // warp also arrives for a chunk that it does not read.
            barrier_init(offsets.empty + at, 8usize);
        }
        barrier_init(offsets.stationary_full, 1usize);
        barrier_init_fence();
        if comptime!(kind.leaves_masked()) {
            #[unroll]
            for word in 0..12usize {
                store_shared(offsets.used + comptime!(4 * word as u32), 0u32);
            }
        }
    }
    sync_cube();

    let index = CUBE_POS as u32;
    if index < work.grid.cubes {
        let work_tile = stationary_work_tile(&work.grid, index, kind.fragment.side);
        let tile = stationary_tile_split(
            work_tile,
            &work.grid,
            masking,
            work.group,
            WgmmaGradientSplitDTiles::ROWS,
            WgmmaGradientSplitDTiles::COLUMNS,
            kind,
        );
        if UNIT_POS >= comptime!(CONSUMERS as u32) {
            setmaxnreg_dec(24usize);
            if UNIT_POS == comptime!(CONSUMERS as u32) {
                fetch(
                    &maps.stationary_qk,
                    &maps.stationary_v_do,
                    &maps.q_or_k,
                    &maps.v_or_do,
                    &maps.bias_or_summed,
                    &maps.lse_delta,
                    masking,
                    &tile,
                    &maps.steps,
                    &offsets,
                    tiles,
                    kind,
                );
            }
        } else {
            setmaxnreg_inc(240usize);
            let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
            // The tile row of the matrix element that the thread holds in its first accumulator register.
            let row = (UNIT_POS / 32u32 % 4u32 * 16u32 + UNIT_POS % 32u32 / 4u32) as i32;
            let sums = sum::<F, NB, NS, NP, NG>(
                &tile, row, lse_delta, &scoring, &offsets, warpgroup, tiles, kind,
            );
            let factor = if comptime!(tiles.sums.has_q_or_k()) {
                times_kept(scoring.arguments.scale, &scoring.dropout)
            } else {
                value_factor(&scoring.dropout, comptime!(p_scale(tiles.half)))
            };
            let split = comptime!(kind.split);
            let kind = comptime!(kind.fragment);
            let factors = row_factors(lse_delta, &tile, row, &masking.seq_lens, factor, kind);
            let target = OutputTarget {
                staging: offsets.stationary_qk
                    + warpgroup
                        * comptime!((tiles.own_subtiles() * PRODUCT_ROWS * ROW_BYTES) as u32),
                map: tensor_map_address(&maps.qk_gradient),
                row,
                first_row: 0i32,
                first_column: warpgroup * comptime!(tiles.own_columns() as u32),
            };
            write_gradient::<G, N, NG>(
                sums,
                factors,
                target,
                &tile,
                gradient,
                comptime!(tiles.output_shape().of_part(split)),
                kind.side,
            );
            await_stores();
        }
    }
}

/// Runs the mainloop over the blocks that the tile sees. Returns the warpgroup's half of the gradient.
#[cube]
fn sum<F: Float, NB: Size, NS: Size, NP: Size, NG: Size>(
    tile: &Stationary,
    row: i32,
    lse_delta: &Tensor<f32>,
    scoring: &Scoring<F, NB>,
    offsets: &SharedOffsets,
    warpgroup: u32,
    #[comptime] tiles: WgmmaGradientSplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, NG> {
    let masking = &scoring.masking;
    let side = comptime!(kind.fragment.side);
    let lane = UNIT_POS % 32u32;
    let ring = Ring {
        full: offsets.full,
        empty: offsets.empty,
        elected: u32::cast_from(lane == 0u32),
    };
    let stationary_qk = uniform(descriptor(offsets.stationary_qk));
    let stationary_v_do = uniform(descriptor(offsets.stationary_v_do));
    let operand =
        descriptor(offsets.stages + warpgroup * comptime!(WgmmaSplitDTiles::HALF_BYTES as u32));
    let used = comptime!(HALF_COLUMNS / 2);
    let row_lse_delta = lse_delta_of_tile(
        lse_delta,
        tile,
        tile.first_row + row,
        &masking.seq_lens,
        WgmmaGradientSplitDTiles::COLUMNS,
        kind.fragment,
    );

    let mut sums = Vector::<f32, NG>::zeroed();
    let mut count = u32::new(0);
    // `passed` counts the chunks that have passed through the ring so far. This count determines the stage
    // (shared-memory buffer) of the next chunk.
    let mut passed = u32::new(0);
    let first = first_visit(tile, masking, kind);
    let mut head = first.head;
    let mut block = first.block;
    if head < tile.heads {
        barrier_wait(offsets.stationary_full, 0u32);
    }
    let row_lse_delta = voted(&row_lse_delta, kind.fragment);
    while head < tile.heads {
        let started = multiply_chunks::<NS>(
            stationary_qk,
            operand,
            ring,
            pipeline_state(passed, tiles.stages),
            offsets.empty,
            0u32,
            comptime!(tiles.score_product(tiles.head_dim, false)),
        );
        passed += comptime!(tiles.dot_chunks() as u32);
        let last_q_or_k = offsets.empty + 8u32 * pipeline_state(passed - 1u32, tiles.stages).stage;
        let started_dp = if comptime!(tiles.sums.has_q_or_k()) {
            multiply_chunks::<NS>(
                stationary_v_do,
                operand,
                ring,
                pipeline_state(passed, tiles.stages),
                last_q_or_k,
                ring.elected,
                comptime!(tiles.score_product(tiles.value_dim, true)),
            )
        } else {
            Vector::<f32, NS>::zeroed()
        };
        let rows = stationary_rows::<F, NB>(tile, scoring, row, head, kind.fragment);
        let tile_position = position_of(tile, head, side);
        let seen = block_mask(
            &tile_position,
            &rows,
            block,
            warpgroup * comptime!((HALF_COLUMNS / 32) as u32),
            masking,
            WgmmaGradientSplitDTiles::COLUMNS,
            HALF_COLUMNS,
            kind,
        );
        let own_lse_delta = offsets.lse_delta
            + count % 2u32 * comptime!(tiles.term_bytes() as u32)
            + warpgroup * comptime!(4 * HALF_COLUMNS as u32);
        let block_lse_delta = lse_delta_of_block(
            &row_lse_delta,
            own_lse_delta,
            WgmmaGradientSplitDTiles::COLUMNS,
        );
        // The keep bits of dropout do not depend on S, so the warpgroup draws them before it waits for S. The tensor
        // cores are busy during the draws.
        let first_column = block * comptime!(WgmmaGradientSplitDTiles::COLUMNS as i32)
            + (warpgroup * comptime!(HALF_COLUMNS as u32)) as i32;
        let keep = keep_bits_ahead::<F, NB>(scoring, &rows, first_column, HALF_COLUMNS, side);
        // Each chunk of dP is one wgmma group. This call waits until at most one group is in flight. S and all chunks
        // of dP except the last are then complete.
        let s = take_fragment::<NS>(
            started,
            used,
            used,
            comptime!(usize::from(tiles.sums.has_q_or_k())),
        );
        let made = weights::<F, NB, NS, NP>(
            s,
            &block_lse_delta,
            first_column,
            &seen,
            &rows,
            scoring,
            &keep,
            HALF_COLUMNS,
            comptime!(tiles.sums.has_values()),
            tiles.half,
            kind.fragment,
        );
        let factors = if comptime!(tiles.sums.has_q_or_k()) {
            let dp = take_fragment::<NS>(started_dp, used, used, 0usize);
            passed += comptime!(tiles.value_chunks() as u32);
            free_chunk(
                offsets.empty + 8u32 * pipeline_state(passed - 1u32, tiles.stages).stage,
                ring.elected,
                0usize,
                1usize,
            );
            dot_gradients::<NS, NP>(
                made.w,
                dp,
                &block_lse_delta,
                &keep,
                &seen,
                HALF_COLUMNS,
                tiles.half,
                kind.fragment,
            )
        } else {
            free_chunk(last_q_or_k, ring.elected, 0usize, 1usize);
            made.p
        };
        hand_over::<NP>(factors, offsets, warpgroup, count, kind);
        sums = add::<NG>(
            sums,
            offsets,
            tile,
            &masking.seq_lens,
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

/// Stores the warpgroup's half of P or dS of the `count`-th block to shared memory. Before the store, the function
/// waits until both warpgroups have read the previous P or dS.
#[cube]
fn hand_over<NP: Size>(
    factors: Vector<u32, NP>,
    offsets: &SharedOffsets,
    warpgroup: u32,
    count: u32,
    #[comptime] kind: TileKind,
) {
    if comptime!(kind.leaves_masked()) {
        signal_used_keys(
            offsets.used,
            used_columns::<NP>(factors, HALF_COLUMNS),
            warpgroup * comptime!((HALF_COLUMNS / 4) as u32),
            count,
        );
    }
    let half = offsets.factors + warpgroup * comptime!(WgmmaSplitDTiles::HALF_BYTES as u32);
    named_barrier(CONSUMER_BARRIER, CONSUMERS);
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
    named_barrier(CONSUMER_BARRIER, CONSUMERS);
}

/// Multiplies P or dS of the `count`-th block by the streamed operand's block (of K, Q or dO), and adds the product to
/// the gradient. `passed` is the number of chunks that pass through the ring of shared-memory buffers before the first
/// chunk of this streamed operand.
///
/// Before the GEMM, the function writes zeros over block rows that no row of the tile sees. A NaN in such a row would give
/// `0 · NaN = NaN`.
#[cube]
fn add<NG: Size>(
    sums: Vector<f32, NG>,
    offsets: &SharedOffsets,
    tile: &Stationary,
    seq_lens: &SeqLens,
    block: i32,
    count: u32,
    passed: u32,
    ring: Ring,
    warpgroup: u32,
    #[comptime] tiles: WgmmaGradientSplitDTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, NG> {
    let product = comptime!(tiles.sum_product());
    let factors = uniform(descriptor(offsets.factors));
    let operand = transposed_descriptor(
        offsets.stages,
        comptime!(WgmmaSplitDTiles::VALUE_KEYS * ROW_BYTES),
    );
    let first = block * comptime!(WgmmaGradientSplitDTiles::COLUMNS as i32);
    let words = used_words(offsets.used, count);
    let dirty = has_unseen(
        &tile.run,
        columns_end(seq_lens, kind.fragment.side),
        first,
        offsets.used,
        count,
        WgmmaGradientSplitDTiles::COLUMNS,
        comptime!(kind.leaves_masked()),
    );
    let mut sums = sums;
    if dirty {
        #[unroll]
        for own in 0..OWN_CHUNKS {
            let pair = passed + comptime!((WgmmaSplitDTiles::WARPGROUPS * own) as u32);
            let at = pipeline_state(pair + warpgroup, tiles.stages);
            let other = pipeline_state(pair + 1u32 - warpgroup, tiles.stages);
            barrier_wait(offsets.full + 8u32 * at.stage, at.parity);
            zero_fill_unseen(
                offsets.stages + at.stage * comptime!(WgmmaSplitDTiles::STAGE_BYTES as u32),
                &tile.run,
                first,
                words,
                UNIT_POS % comptime!(WARPGROUP as u32),
                comptime!(own * WgmmaSplitDTiles::VALUE_KEYS),
                WARPGROUP,
                WgmmaSplitDTiles::VALUE_KEYS,
                comptime!(tiles.own_subtiles()),
                comptime!(kind.leaves_masked()),
            );
            warpgroup_barrier();
            sums = add_chunks::<NG>(
                sums, factors, operand, ring, at, other, own, 1usize, product,
            );
            sums = settled::<NG>(sums, tiles);
            free_own(offsets, ring, at.stage);
        }
    } else {
        let at = pipeline_state(passed + warpgroup, tiles.stages);
        let other = pipeline_state(passed + 1u32 - warpgroup, tiles.stages);
        sums = add_chunks::<NG>(
            sums, factors, operand, ring, at, other, 0usize, OWN_CHUNKS, product,
        );
        sums = settled::<NG>(sums, tiles);
        let last = pipeline_state(
            passed
                + warpgroup
                + comptime!((WgmmaSplitDTiles::WARPGROUPS * (OWN_CHUNKS - 1)) as u32),
            tiles.stages,
        );
        free_own(offsets, ring, last.stage);
    }
    sums
}

/// Waits until no GEMM is in flight, and returns the gradient. The gradient is then complete for the blocks so far.
#[cube]
fn settled<NG: Size>(
    sums: Vector<f32, NG>,
    #[comptime] tiles: WgmmaGradientSplitDTiles,
) -> Vector<f32, NG> {
    take_fragment::<NG>(
        sums,
        comptime!(tiles.own_columns() / 2),
        comptime!(tiles.fragments()[2]),
        0usize,
    )
}

/// Waits until no wgmma group is in flight. Then frees the shared-memory buffer of ring stage `stage`, so that
/// the producer can refill it.
#[cube]
fn free_own(offsets: &SharedOffsets, ring: Ring, stage: u32) {
    free_chunk(offsets.empty + 8u32 * stage, ring.elected, 0usize, 1usize);
}
