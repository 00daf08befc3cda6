//! The split-D forward on Hopper, for up to 512 columns of V. Two warpgroups process the same 64 queries. Each warpgroup
//! computes half of the columns of O.
//!
//! Algorithm. For each block of keys, each warpgroup computes S and P for half of the block's keys. The warpgroups
//! exchange their row maxima and P through shared memory. Then each warpgroup computes `O += P V` for its half of the
//! columns.
//!
//! Tensors (half precision unless noted):
//! - Q `[batch, q_heads, q_len, head_dim]`, K `[batch, kv_heads, kv_len, head_dim]`, V `[batch, kv_heads, kv_len, value_dim]`.
//! - Optional: bias `[batch, q_heads, q_len, kv_len]` with any strides, sinks `[q_heads]`, mask bits (u32), lengths and
//!   segment ids (i32).
//! - O `[splits · batch, q_heads, q_len, value_dim]`, f32 with split-KV. LSE `[2 · splits · batch, q_heads, q_len]`, f32: row
//!   maxima in the first half, logarithms of row_sum in the second.
//!
//! Budget. [`WgmmaSplitDTiles::shared_memory`] at head size 512: 64 KB for the queries, a ring of 8 × 16 KB, two
//! buffers of 16 KB each for P, and the row maxima. Registers per thread: 128 for O, 32 for S.
//!
//! Schedule. K and V pass through one ring of *stages* in shared memory. Each block is cut into *chunks*, and a chunk
//! fills one stage. A chunk of K has 64 columns. A chunk of V has 32 keys, and half of the columns of V. One warpgroup
//! uses the even chunks of V, and the other the odd chunks. The order of the blocks in the ring is `K₀ K₁ V₀ K₂ V₁ …`.
//! For each block, each warpgroup does these steps, where S', K' and P' are for the next block:
//! 1. Issue the GEMM `S' = Q K'ᵀ` of the next block.
//! 2. Rescale O, and issue `O += P V`.
//! 3. Wait for S'. Compute P' while the tensor cores run `P V`.
//! 4. Wait for O.
//!
//! Bound. For a block of 128 keys, the tensor cores take `4 head_dim + 4 value_dim` clocks. The accesses to shared
//! memory take about 1.3 times as long, because each warpgroup reads all queries and the whole P. Shared memory
//! bandwidth therefore limits the kernel.

mod mainloop;
mod producer;
mod softmax;
mod warpgroups;
mod zero_fill;

use self::mainloop::run_mainloop;
use self::producer::{fetch, offsets};
use self::warpgroups::CONSUMERS;
use super::scheduler::{init_mailbox, mailbox_at, mailbox_bytes, receive_item};
use crate::engine::tensor_core::common::dropout::output_factor;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::tile_scheduler::{
    TileKind, TileScheduler, assigned_tile, ordered_item, row_pair,
};
use crate::engine::tensor_core::wgmma::chunked_gemm::Ring;
use crate::engine::tensor_core::wgmma::forward::load::{
    ForwardMaps, Sources, zero_fill_other_queries,
};
use crate::engine::tensor_core::wgmma::forward::pages::page_sources;
use crate::engine::tensor_core::wgmma::output::{OutputTarget, write_tile};
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitDTiles;
use cube_kit::hopper::ptx::{barrier_arrive, barrier_init_fence, setmaxnreg_dec, setmaxnreg_inc};
use cube_kit::hopper::{PRODUCT_ROWS, WARPGROUP};
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::mbarrier::barrier_init;
use cube_kit::nvidia::ptx::{shared_address, store_shared, uniform};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_split_d<
    E: Float,
    O: Float,
    F: Float,
    K: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NQ: Size,
    NO: Size,
>(
    maps: ForwardMaps<E>,
    scoring: Scoring<F, NB>,
    sinks: ComptimeOption<OwnedTensor<K>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    scheduler: TileScheduler,
    scale_log2: f32,
    #[comptime] tiles: WgmmaSplitDTiles,
    #[comptime] kind: TileKind,
    #[comptime] stores_output_by_tma: bool,
    #[define(E, O, F, K)] _elements: [ElemType; 4],
    #[define(N, NB, NS, NQ, NO)] _sizes: [usize; 5],
) {
    let masking = &scoring.masking;
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!((tiles.shared_memory() + mailbox_bytes(kind)) / 4),
        1024usize,
    );
    let start = shared_address(&memory);
    let offsets = offsets(start, tiles);
    let mailbox = mailbox_at(start, comptime!(tiles.shared_memory()), kind);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(offsets.full + at, 1usize);
            // An empty barrier expects 8 arrivals. For a chunk of K, each of the 8 warps arrives once. For a chunk of
            // V, each of the 4 warps of one warpgroup arrives twice. The first chunk of V of a block is an exception if
            // the ring has fewer stages than the block has chunks of V. Each of the 8 warps then arrives once for this
            // chunk.
            barrier_init(offsets.empty + at, 8usize);
        }
        barrier_init(offsets.queries_full, 1usize);
        barrier_init(offsets.queries_empty, 8usize);
        init_mailbox(mailbox, 8usize, kind);
        barrier_init_fence();
        if comptime!(kind.leaves_masked()) {
            #[unroll]
            for word in 0..12usize {
                store_shared(offsets.used + comptime!(4 * word as u32), 0u32);
            }
        }
    }
    zero_fill_other_queries(
        offsets.queries,
        &masking.seq_lens,
        WgmmaSplitDTiles::ROWS,
        comptime!(tiles.key_chunks()),
        WgmmaSplitDTiles::UNITS,
        kind,
    );
    sync_cube();

    if UNIT_POS >= comptime!(CONSUMERS as u32) {
        setmaxnreg_dec(24usize);
        if UNIT_POS == comptime!(CONSUMERS as u32) {
            let sources = Sources {
                query: tensor_map_address(&maps.query),
                key: tensor_map_address(&maps.key),
                value: tensor_map_address(&maps.value),
                steps: maps.steps,
                pages: page_sources(&maps.page_table),
            };
            fetch(
                &sources, masking, &scheduler, &offsets, mailbox, tiles, kind,
            );
        }
    } else {
        setmaxnreg_inc(240usize);
        let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
        let lane = UNIT_POS % 32u32;
        // The tile row of the matrix element that the thread holds in its first accumulator register.
        let row = (UNIT_POS / 32u32 % 4u32 * 16u32 + lane / 4u32) as i32;
        let ring = Ring {
            full: offsets.full,
            empty: offsets.empty,
            elected: u32::cast_from(lane == 0u32),
        };
        // The output passes through a staging buffer, for which the kernel uses the buffer of the queries. The buffer
        // is free: before the warpgroups exchange row_sum, both have finished reading the queries.
        let staging = offsets.queries
            + warpgroup * comptime!((tiles.value_subtiles() * PRODUCT_ROWS * ROW_BYTES) as u32);
        let first_column = warpgroup * comptime!(tiles.value_columns() as u32);
        let writes_logsumexp = warpgroup == 0u32;
        let target = OutputTarget {
            staging,
            map: tensor_map_address(&maps.output),
            row,
            first_row: 0i32,
            first_column,
        };

        let mut item = ordered_item(&scheduler, CUBE_POS as u32, masking, kind);
        let mut turn = 0u32;
        let mut tiles_done = 0u32;
        let mut visited = 0u32;
        while item < scheduler.schedule.items {
            let assigned_tile = assigned_tile(
                &scheduler,
                item,
                turn,
                masking,
                WgmmaSplitDTiles::ROWS,
                WgmmaSplitDTiles::KEYS,
                kind,
            );
            if assigned_tile.exists {
                let tile = assigned_tile.tile;
                let rows = row_pair::<F, NB>(&tile, &scoring, row, kind);
                let attended = run_mainloop::<F, NB, NS, NQ, NO>(
                    &assigned_tile,
                    &rows,
                    &scoring,
                    &offsets,
                    ring,
                    tiles_done % 2u32,
                    visited,
                    scale_log2,
                    tiles,
                    kind,
                );
                visited = attended.visited;
                write_tile::<O, K, N, NO>(
                    attended.finished,
                    target,
                    writes_logsumexp,
                    &tile,
                    &rows,
                    &sinks,
                    output,
                    logsumexp,
                    &scoring.arguments,
                    output_factor(&scoring.dropout, tiles.half),
                    comptime!(tiles.output_shape(stores_output_by_tma)),
                    kind.fragment,
                );
                barrier_arrive(offsets.queries_empty, ring.elected);
                tiles_done += 1u32;
            }
            item = receive_item(&scheduler.schedule, item, turn, mailbox, ring.elected, kind);
            turn += 1u32;
        }
    }
}
