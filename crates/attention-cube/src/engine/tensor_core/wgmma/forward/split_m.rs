//! The split-M forward on Hopper, for up to 256 columns of V. Each warpgroup has 64 queries, and computes all columns
//! of the output of these queries.
//!
//! Algorithm. For each block of keys, each warpgroup computes `S = Q Kᵀ`, then P by the online softmax in registers,
//! then `O += P V`. The epilogue divides O by row_sum, and writes O and the LSE.
//!
//! Tensors (half precision unless noted):
//! - Q `[batch, q_heads, q_len, head_dim]`, K `[batch, kv_heads, kv_len, head_dim]`, V `[batch, kv_heads, kv_len, value_dim]`.
//! - Optional: bias `[batch, q_heads, q_len, kv_len]` with any strides, sinks `[q_heads]`, mask bits (u32), lengths and
//!   segment ids (i32).
//! - O `[splits · batch, q_heads, q_len, value_dim]`, f32 with split-KV. LSE `[2 · splits · batch, q_heads, q_len]`, f32: row
//!   maxima in the first half, logarithms of row_sum in the second.
//!
//! Budget. Shared memory ([`WgmmaSplitMTiles::shared_memory`]) holds the queries, a ring of `stages` blocks of K, and a ring
//! of `stages` blocks of V. Registers per thread, at head size 256: 128 for O, 32 for S, 16 for P. Another 16 hold the next
//! P. The consumers obtain these registers from the producer warpgroup by `setmaxnreg`.
//!
//! Schedule. One thread of the producer warpgroup keeps the rings full. For each block, the consumers do these steps,
//! where S', K' and P' are for the next block:
//! 1. Issue the GEMM `S' = Q K'ᵀ` of the next block.
//! 2. Rescale O, and issue `O += P V`.
//! 3. Wait for S', and compute P' from S' while the tensor cores run `P V`.
//! 4. Wait for O.
//!
//! With ping-pong (FlashAttention-3), only one warpgroup at a time issues steps 1 and 2.
//!
//! Bound. For a tile of `rows` queries and a block of `keys` keys, the tensor cores take
//! `rows · keys · (head_dim + value_dim) / 2048` clocks. The accesses to shared memory take a little less. From head
//! size 128 on, the tensor cores limit the kernel. At head size 64, the exponentials limit the kernel.

mod biases;
mod mainloop;
mod producer;
mod products;
mod softmax;
mod zero_fill;

use self::mainloop::{BlockCounts, Thread, run_mainloop};
use self::producer::{fetch, offsets};
use super::scheduler::{init_mailbox, mailbox_at, mailbox_bytes, receive_item};
use crate::engine::tensor_core::common::dropout::output_factor;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::tile_scheduler::{
    TileKind, TileScheduler, assigned_tile, ordered_item, row_pair,
};
use crate::engine::tensor_core::wgmma::forward::load::{
    ForwardMaps, Sources, zero_fill_other_queries,
};
use crate::engine::tensor_core::wgmma::forward::pages::page_sources;
use crate::engine::tensor_core::wgmma::output::{OutputTarget, write_tile};
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitMTiles;
use cube_kit::hopper::barriers::ordering_barrier_arrive;
use cube_kit::hopper::ptx::{barrier_arrive, barrier_init_fence, setmaxnreg_dec, setmaxnreg_inc};
use cube_kit::hopper::tma::await_stores;
use cube_kit::hopper::{PRODUCT_ROWS, WARPGROUP};
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::mbarrier::barrier_init;
use cube_kit::nvidia::ptx::{shared_address, store_shared, uniform};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_split_m<
    E: Float,
    O: Float,
    F: Float,
    K: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NP: Size,
    NO: Size,
>(
    maps: ForwardMaps<E>,
    scoring: Scoring<F, NB>,
    sinks: ComptimeOption<OwnedTensor<K>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    scheduler: TileScheduler,
    scale_log2: f32,
    #[comptime] tiles: WgmmaSplitMTiles,
    #[comptime] kind: TileKind,
    #[comptime] stores_output_by_tma: bool,
    #[define(E, O, F, K)] _elements: [ElemType; 4],
    #[define(N, NB, NS, NP, NO)] _sizes: [usize; 5],
) {
    let masking = &scoring.masking;
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!((tiles.shared_memory() + mailbox_bytes(kind)) / 4),
        1024usize,
    );
    let start = shared_address(&memory);
    let offsets = offsets(start, tiles);
    let mailbox = mailbox_at(start, comptime!(tiles.shared_memory()), kind);
    let consumers = comptime!(tiles.warpgroups * WARPGROUP);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(offsets.key_full + at, 1usize);
            barrier_init(offsets.key_empty + at, comptime!(4 * tiles.warpgroups));
            barrier_init(offsets.value_full + at, 1usize);
            barrier_init(offsets.value_empty + at, comptime!(4 * tiles.warpgroups));
        }
        barrier_init(offsets.queries_full, 1usize);
        barrier_init(offsets.queries_empty, comptime!(4 * tiles.warpgroups));
        #[unroll]
        for turn in 0..3u32 {
            barrier_init(
                offsets.used_ready + 8u32 * turn,
                comptime!(4 * tiles.warpgroups),
            );
        }
        #[unroll]
        for stage in 0..tiles.bias_stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(offsets.bias_full + at, 1usize);
            barrier_init(offsets.bias_empty + at, comptime!(4 * tiles.warpgroups));
        }
        init_mailbox(mailbox, comptime!(4 * tiles.warpgroups), kind);
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
        comptime!(tiles.rows()),
        comptime!(tiles.key_subtiles()),
        comptime!(tiles.units()),
        kind,
    );
    sync_cube();

    if UNIT_POS >= comptime!(consumers as u32) {
        setmaxnreg_dec(comptime!(tiles.thread_registers()[0]));
        if UNIT_POS == comptime!(consumers as u32) {
            let sources = Sources {
                query: tensor_map_address(&maps.query),
                key: tensor_map_address(&maps.key),
                value: tensor_map_address(&maps.value),
                steps: maps.steps,
                pages: page_sources(&maps.page_table),
            };
            let bias_map = tensor_map_address(&maps.bias);
            fetch(
                &sources, bias_map, masking, &scheduler, &offsets, mailbox, tiles, kind,
            );
        }
    } else {
        setmaxnreg_inc(comptime!(tiles.thread_registers()[1]));
        let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
        let lane = UNIT_POS % 32u32;
        let elected = u32::cast_from(lane == 0u32);
        let thread = Thread { warpgroup, elected };
        // The tile row of the matrix element that the thread holds in its first accumulator register.
        let row = (UNIT_POS / 32u32 * 16u32 + lane / 4u32) as i32;
        let target = OutputTarget {
            staging: offsets.output + warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32),
            row,
            first_row: (warpgroup * comptime!(PRODUCT_ROWS as u32)) as i32,
            first_column: 0u32,
            map: tensor_map_address(&maps.output),
        };
        if comptime!(tiles.orders_warpgroups) {
            // With ping-pong, the warpgroups take turns to issue GEMMs. The last warpgroup signals here that its turn
            // is over, so that the first warpgroup begins.
            if warpgroup == comptime!(tiles.warpgroups as u32 - 1) {
                ordering_barrier_arrive(warpgroup, tiles.warpgroups);
            }
        }

        let mut item = ordered_item(&scheduler, CUBE_POS as u32, masking, kind);
        let mut turn = 0u32;
        let mut tiles_done = 0u32;
        let mut visited = 0u32;
        let mut masked = 0u32;
        while item < scheduler.schedule.items {
            let assigned_tile = assigned_tile(
                &scheduler,
                item,
                turn,
                masking,
                comptime!(tiles.rows()),
                tiles.keys,
                kind,
            );
            if assigned_tile.exists {
                let tile = assigned_tile.tile;
                let rows = row_pair::<F, NB>(&tile, &scoring, row, kind);
                let attended = run_mainloop::<F, NB, NS, NP, NO>(
                    &assigned_tile,
                    &rows,
                    &scoring,
                    &offsets,
                    thread,
                    tiles_done % 2u32,
                    BlockCounts {
                        blocks: visited,
                        masked,
                    },
                    scale_log2,
                    tiles,
                    kind,
                );
                visited = attended.visited.blocks;
                masked = attended.visited.masked;
                // If TMA stores the output from the buffer of the queries, this buffer becomes free only when TMA has
                // finished the store.
                if comptime!(tiles.has_output_place() || !stores_output_by_tma) {
                    barrier_arrive(offsets.queries_empty, elected);
                }
                write_tile::<O, K, N, NO>(
                    attended.finished,
                    target,
                    true,
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
                if comptime!(!tiles.has_output_place() && stores_output_by_tma) {
                    barrier_arrive(offsets.queries_empty, elected);
                }
                tiles_done += 1u32;
            }
            item = receive_item(&scheduler.schedule, item, turn, mailbox, elected, kind);
            turn += 1u32;
        }
        if comptime!(stores_output_by_tma) {
            await_stores();
        }
    }
}
