//! The split-M backward on Hopper, for head sizes up to 256. Each warpgroup has 64 rows, which are queries or keys. It
//! computes all columns of the gradients of these rows.
//!
//! Algorithm. For each streamed block, each warpgroup recomputes S, and then P from S and the LSE. It computes
//! `dP = dO Vᵀ` and `dS = P ∘ (dP − delta)`. For a tile of queries, it then accumulates `dQ += dS K`. For a tile of
//! keys, it accumulates `dK += dSᵀ Q` and `dV += Pᵀ dO`.
//!
//! Tensors (half precision unless noted):
//! - `stationary_qk` and `stationary_v_do`: Q and dO for a tile of queries, K and V for a tile of keys. `q_or_k` and
//!   `v_or_do`: the tensors whose blocks the kernel streams. All are `[batch, heads, len, dim]`.
//! - `lse_delta` `[batch, q_heads, 5, padded q_len]`, f32. `auxiliary/delta/kernel.rs` lists the meaning of its 5 rows,
//!   which hold LSE and delta.
//! - Optional: bias, mask bits (u32), lengths and segment ids (i32).
//! - Gradients `[splits · batch, heads, len, dim]`, f32 with splits: `dot_gradient` is dQ or dK, `value_gradient` is dV.
//!
//! Budget. Shared memory ([`WgmmaGradientSplitMTiles::shared_memory`]) holds the stationary tile, a ring of blocks of
//! `q_or_k`, and a ring of blocks of `v_or_do`. Registers per thread, at head size 256: 128 for the gradient, 32 for S, 32
//! for dP, 16 for dS.
//!
//! Schedule. One thread of the producer warpgroup keeps the rings full. For each block, the consumers do these steps,
//! where S', P', dP' and dS' are for the next block:
//! 1. Issue the gradient GEMMs, which read P and dS. Issue the GEMM of S' behind the gradient GEMMs.
//! 2. Wait for the gradient GEMMs, and free the buffers of the current block.
//! 3. Issue the GEMM of dP' behind the GEMM of S'.
//! 4. Compute P' and dS' from S' and dP'.
//!
//! The warpgroups take turns to issue GEMMs (ping-pong), so that one warpgroup computes P and dS while the tensor cores
//! run the GEMMs of another warpgroup.
//!
//! Bound. For a tile of `rows` rows and a block of `columns` rows, a GEMM over `head_dim` (S, dQ, dK) occupies the
//! tensor cores for `rows · columns · head_dim / 2048` clocks. For a GEMM over `value_dim` (dP, dV), the number is
//! `rows · columns · value_dim / 2048` clocks. The GEMMs of S and dP read both operands from shared memory. For blocks
//! of 64 rows, these reads take as long as the GEMM itself.

mod p_ds;
mod producer;
mod products;
mod zero_fill;

use self::p_ds::{ConsumerThread, compute_p_ds};
use self::producer::{SharedOffsets, fetch, offsets};
use self::products::{
    Gradients, await_q_or_k, await_values, block_operands, multiply, operands, settle, start_dp,
    start_s,
};
use self::zero_fill::zero_fill_block;
use crate::engine::tensor_core::common::dropout::{times_kept, value_factor};
use crate::engine::tensor_core::common::far::voted;
use crate::engine::tensor_core::common::gradient::p_scale;
use crate::engine::tensor_core::common::scoring::GradientGrid;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::stationary_tile::{
    Stationary, first_visit, lse_delta_of_tile, row_factors, seen_by, stationary_tile_split,
    stationary_work_tile, visit_from,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::backward::load::GradientMaps;
use crate::engine::tensor_core::wgmma::output::{OutputTarget, write_gradient};
use crate::engine::tensor_core::wgmma::plan::WgmmaGradientSplitMTiles;
use crate::math::side::Side;
use cube_kit::hopper::barriers::{ordering_barrier_arrive, ordering_barrier_wait};
use cube_kit::hopper::ptx::{barrier_init_fence, barrier_wait, setmaxnreg_dec, setmaxnreg_inc};
use cube_kit::hopper::tma::await_stores;
use cube_kit::hopper::{PRODUCT_ROWS, WARPGROUP};
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::accumulator::pair;
use cube_kit::nvidia::mbarrier::barrier_init;
use cube_kit::nvidia::ptx::{shared_address, store_shared, uniform};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The named barrier at which all consumer warps wait for each other, before and after they write zeros over rows of a
/// block.
const CONSUMER_BARRIER: u32 = 1;

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
>(
    maps: GradientMaps<E>,
    lse_delta: &Tensor<f32>,
    scoring: Scoring<F, NB>,
    dot_gradient: &mut Tensor<Vector<G, N>>,
    value_gradient: &mut Tensor<Vector<G, N>>,
    work: GradientGrid,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
    #[comptime] kind: TileKind,
    #[define(E, G, F)] _elements: [ElemType; 3],
    #[define(N, NB, NS, NP, ND, NV)] _sizes: [usize; 6],
) {
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let offsets = offsets(shared_address(&memory), tiles);
    let consumers = comptime!(tiles.warpgroups * WARPGROUP);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.dot_stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(offsets.dot_full + at, 1usize);
            barrier_init(offsets.dot_empty + at, comptime!(4 * tiles.warpgroups));
        }
        #[unroll]
        for stage in 0..tiles.value_stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(offsets.value_full + at, 1usize);
            barrier_init(offsets.value_empty + at, comptime!(4 * tiles.warpgroups));
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
            comptime!(tiles.rows()),
            tiles.columns,
            kind,
        );
        if UNIT_POS >= comptime!(consumers as u32) {
            setmaxnreg_dec(comptime!(tiles.thread_registers()[0]));
            if UNIT_POS == comptime!(consumers as u32) {
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
            setmaxnreg_inc(comptime!(tiles.thread_registers()[1]));
            let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
            // The tile row of the matrix element that the thread holds in its first accumulator register.
            let row = (UNIT_POS / 32u32 * 16u32 + UNIT_POS % 32u32 / 4u32) as i32;
            let sums = sum::<F, NB, NS, NP, ND, NV>(
                &tile, row, lse_delta, &scoring, &offsets, warpgroup, tiles, kind,
            );
            let staging = warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32);
            let first_row = (warpgroup * comptime!(PRODUCT_ROWS as u32)) as i32;
            let split = comptime!(kind.split);
            let kind = comptime!(kind.fragment);
            if comptime!(tiles.sums.has_q_or_k()) {
                let scale = times_kept(scoring.arguments.scale, &scoring.dropout);
                let factors = row_factors(lse_delta, &tile, row, &masking.seq_lens, scale, kind);
                let target = OutputTarget {
                    staging: offsets.stationary_qk + staging,
                    map: tensor_map_address(&maps.qk_gradient),
                    row,
                    first_row,
                    first_column: 0u32,
                };
                write_gradient::<G, N, ND>(
                    sums.q_or_k,
                    factors,
                    target,
                    &tile,
                    dot_gradient,
                    comptime!(tiles.dot_shape().of_part(split)),
                    kind.side,
                );
            }
            if comptime!(tiles.sums.has_values()) {
                let place = if comptime!(tiles.sums.has_q_or_k()) {
                    offsets.stationary_v_do
                } else {
                    offsets.stationary_qk
                };
                let target = OutputTarget {
                    staging: place + staging,
                    map: tensor_map_address(&maps.value_gradient),
                    row,
                    first_row,
                    first_column: 0u32,
                };
                let factor = value_factor(&scoring.dropout, comptime!(p_scale(tiles.half)));
                write_gradient::<G, N, NV>(
                    sums.v_or_do,
                    pair(factor, factor),
                    target,
                    &tile,
                    value_gradient,
                    comptime!(tiles.value_shape().of_part(split)),
                    Side::Keys,
                );
            }
            await_stores();
        }
    }
}

/// Runs the mainloop over the blocks that the tile sees. Returns the warpgroup's rows of the gradients.
#[cube]
fn sum<F: Float, NB: Size, NS: Size, NP: Size, ND: Size, NV: Size>(
    tile: &Stationary,
    row: i32,
    lse_delta: &Tensor<f32>,
    scoring: &Scoring<F, NB>,
    offsets: &SharedOffsets,
    warpgroup: u32,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
    #[comptime] kind: TileKind,
) -> Gradients<ND, NV> {
    let masking = &scoring.masking;
    let lane = UNIT_POS % 32u32;
    let elected = u32::cast_from(lane == 0u32);
    let thread = ConsumerThread { warpgroup, elected };
    let operands = operands(offsets, warpgroup, tiles);
    let row_lse_delta = lse_delta_of_tile(
        lse_delta,
        tile,
        tile.first_row + row,
        &masking.seq_lens,
        tiles.columns,
        kind.fragment,
    );
    let mut q_or_k = Vector::<f32, ND>::zeroed();
    let mut v_or_do = Vector::<f32, NV>::zeroed();
    let first = first_visit(tile, masking, kind);
    if first.head < tile.heads {
        barrier_wait(offsets.stationary_full, 0u32);
        // The warpgroups take turns to issue GEMMs. At the start, the last warpgroup signals that its turn is over, so that
        // the first warpgroup begins.
        if warpgroup == comptime!(tiles.warpgroups as u32 - 1) {
            ordering_barrier_arrive(warpgroup, tiles.warpgroups);
        }
        let mut count = u32::new(0);
        let mut masked = u32::new(0);
        let mut block = first.block;
        let next_operands = block_operands(operands.q_or_k, operands.v_or_do, count, tiles);
        await_q_or_k(offsets, count, tiles);
        let s = start_s::<NS>(operands.stationary_qk, next_operands, tiles);
        await_values(offsets, count, tiles);
        let dp = start_dp::<NS>(operands.stationary_v_do, next_operands, tiles);
        // `voted` waits for data from global memory: the LSE of the thread's rows, or flags that mark *far* queries
        // (whose LSE needs two f32). The first GEMMs have already started, so they run during this wait.
        let row_lse_delta = voted(&row_lse_delta, kind.fragment);
        let seen = seen_by::<F, NB>(
            tile,
            row,
            first.head,
            block,
            0u32,
            scoring,
            tiles.columns,
            tiles.columns,
            kind,
        );
        let made = compute_p_ds::<F, NB, NS, NP>(
            s,
            dp,
            &seen,
            &row_lse_delta,
            block,
            scoring,
            offsets,
            count,
            thread,
            tiles,
            kind,
        );
        let mut p = made.p;
        let mut ds = made.ds;
        let mut may_have_masked = seen.block_mask.may_have_masked;

        let next = visit_from(tile, first.head, block + 1i32, masking, kind);
        let mut next_head = next.head;
        let mut next_block = next.block;
        while next_head < tile.heads {
            zero_fill_block::<NP>(
                p,
                ds,
                offsets,
                tile,
                &masking.seq_lens,
                block,
                count,
                may_have_masked,
                masked,
                tiles,
                kind,
            );
            // The warpgroup computes the descriptors of its operands before its turn to issue GEMMs begins. During the
            // turn, this computation would delay the other warpgroups, which wait for their turns.
            let summed = block_operands(
                operands.summed_q_or_k,
                operands.summed_v_or_do,
                count,
                tiles,
            );
            let next_operands =
                block_operands(operands.q_or_k, operands.v_or_do, count + 1u32, tiles);
            ordering_barrier_wait(warpgroup);
            let added = multiply::<NP, ND, NV>(q_or_k, v_or_do, p, ds, summed, tiles);
            await_q_or_k(offsets, count + 1u32, tiles);
            let s = start_s::<NS>(operands.stationary_qk, next_operands, tiles);
            let seen = seen_by::<F, NB>(
                tile,
                row,
                next_head,
                next_block,
                0u32,
                scoring,
                tiles.columns,
                tiles.columns,
                kind,
            );
            let settled =
                settle::<NP, ND, NV>(added, p, ds, offsets, count, elected, 1usize, tiles);
            // The GEMM of dP for the next block needs registers that held P and dS until now. The GEMM therefore starts
            // only here.
            await_values(offsets, count + 1u32, tiles);
            let dp = start_dp::<NS>(operands.stationary_v_do, next_operands, tiles);
            ordering_barrier_arrive(warpgroup, tiles.warpgroups);
            q_or_k = settled.q_or_k;
            v_or_do = settled.v_or_do;
            if comptime!(kind.leaves_masked()) {
                masked += u32::cast_from(may_have_masked);
                may_have_masked = seen.block_mask.may_have_masked;
            }
            block = next_block;
            count += 1u32;
            let made = compute_p_ds::<F, NB, NS, NP>(
                s,
                dp,
                &seen,
                &row_lse_delta,
                block,
                scoring,
                offsets,
                count,
                thread,
                tiles,
                kind,
            );
            p = made.p;
            ds = made.ds;
            let next = visit_from(tile, next_head, block + 1i32, masking, kind);
            next_head = next.head;
            next_block = next.block;
        }
        zero_fill_block::<NP>(
            p,
            ds,
            offsets,
            tile,
            &masking.seq_lens,
            block,
            count,
            may_have_masked,
            masked,
            tiles,
            kind,
        );
        let summed = block_operands(
            operands.summed_q_or_k,
            operands.summed_v_or_do,
            count,
            tiles,
        );
        let added = multiply::<NP, ND, NV>(q_or_k, v_or_do, p, ds, summed, tiles);
        let settled = settle::<NP, ND, NV>(added, p, ds, offsets, count, elected, 0usize, tiles);
        q_or_k = settled.q_or_k;
        v_or_do = settled.v_or_do;
    }
    Gradients::<ND, NV> { q_or_k, v_or_do }
}
