//! The split-D forward, for value sizes up to 512. The scores of a block are divided among the warps by rows and by
//! keys. The tile's output is divided among the warps by rows and by columns.
//!
//! Tensors:
//!
//! - Query `[batch, q_heads, q_len, head_dim]`, f16 or bf16.
//! - Keys `[batch, kv_heads, kv_len, head_dim]` and values `[batch, kv_heads, kv_len, value_dim]`, in the query's dtype.
//! - Output `[splits · batch, q_heads, q_len, value_dim]`, f32 if there are several splits.
//! - Logsumexp `[2 · splits · batch, q_heads, q_len]`, f32. The first half of the tensor holds the row maxima, the second
//!   half the natural logarithms of the row sums.
//!
//! Budget. The sizes are for head size 512 with 227 KB of shared memory ([`MmaSplitDTiles::shared_memory`]). Shared memory
//! holds the queries in 64 KB, P of a block in 16 KB, and a ring of 4 slots of 32 KB. A thread uses 128 registers for O and
//! 32 for S.
//!
//! Bound. On an H200, the bandwidth of shared memory limits the kernel. A block of 128 keys takes 6,300 clocks of the tensor
//! core, and 8,500 clocks of shared memory. The operand reads for S take 4,100 clocks of shared memory. Each warp computes
//! only 32 × 32 scores, so several warps read the same operand rows. The operand reads for O take only 2,000 clocks, since
//! each warp computes 64 × 64 elements of O. The writes of the copies take 2,000 clocks. On gaming GPUs, the tensor core is
//! slower and becomes the limit.
//!
//! Schedule. Keys and values pass through one ring of slots in shared memory, in chunks. A chunk of K has some columns
//! for all keys of a block. A chunk of V has some or all columns for some keys of a block. The blocks pass in the order
//! `K₀ K₁ V₀ K₂ V₁ … Vₙ`. All warps copy and multiply. Each slot has a *full* barrier (the copies to the slot have
//! completed) and an *empty* barrier (all warps have read the slot).
//!
//! The main loop is pipelined by one block, and one iteration is called a *pass*. In a pass, the warps first multiply
//! the queries by the current block's keys, and store the row maxima. They then multiply P of the previous block by the
//! previous block's values, and also compute P of the current block. One half of the warps computes P before the GEMM
//! with the first chunk of values, the second half after this GEMM. Each warp scheduler has one warp of each half, so
//! the exponentials of one warp overlap with the `mma` of another warp.
//!
//! Warps that compute different columns of the same output rows form a *row group*. Each row group has its own
//! barriers. The first barrier signals that the group's warps have stored their row maxima, the second that they have
//! stored P. If shared memory holds P of only one block, a third barrier signals that all warps of the group have
//! finished the GEMM with the previous P.

mod chunks;
mod mainloop;
mod shared_offsets;
mod softmax;
mod warp_roles;

use self::chunks::Operands;
use self::mainloop::{MainloopOutput, run_mainloop};
use self::shared_offsets::{SharedOffsets, offsets};
use self::warp_roles::{Roles, assign_roles};
use super::load::{HeadRows, copy_queries, head_source};
use crate::engine::tensor_core::common::dropout::output_factor;
use crate::engine::tensor_core::common::output::{
    Finished, STEP_REGISTERS, normalised, output_rows, step_of, write_rows,
};
use crate::engine::tensor_core::common::scoring::ForwardOperands;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::softmax::quad_sum;
use crate::engine::tensor_core::common::tile_scheduler::{
    TileKind, TileScheduler, assigned_tile, ordered_item, row_pair,
};
use crate::engine::tensor_core::mma::fragments::{load_row_pair, store_row_pair};
use crate::engine::tensor_core::mma::plan::split_d::MmaSplitDTiles;
use crate::engine::tensor_core::mma::ring::make_ring;
use cube_kit::ampere::{BARRIER_BYTES, FRAGMENT_ROWS};
use cube_kit::nvidia::accumulator::pair;
use cube_kit::nvidia::mbarrier::barrier_init;
use cube_kit::nvidia::ptx::shared_address;
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is decided at compile time, the inner one at run time"
)]
pub(crate) fn forward_split_d<
    E: Float,
    O: Float,
    F: Float,
    K: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NO: Size,
    AS: Size,
    AO: Size,
>(
    inputs: ForwardOperands<E, E>,
    scoring: Scoring<F, NB>,
    sinks: ComptimeOption<OwnedTensor<K>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    scheduler: TileScheduler,
    scale_log2: f32,
    #[comptime] tiles: MmaSplitDTiles,
    #[comptime] kind: TileKind,
    #[define(E, O, F, K)] _elements: [ElemType; 4],
    #[define(N, NB, NS, NO, AS, AO)] _sizes: [usize; 6],
) {
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
    if UNIT_POS == 0u32 {
        make_barriers(start, tiles);
    }
    sync_cube();
    let item = ordered_item(&scheduler, CUBE_POS as u32, masking, kind);
    if item < scheduler.schedule.items {
        let assigned = assigned_tile(
            &scheduler, item, 0u32, masking, tiles.rows, tiles.keys, kind,
        );
        let tile = assigned.tile;
        let roles = assign_roles(tiles);
        let offsets = offsets(start, &roles, tiles);
        let head = HeadRows {
            batch: tile.batch,
            head: tile.kv_head,
            first: tile.keys.first,
            end: min(tile.keys.end, masking.seq_lens.kv_len),
        };
        let operands = Operands {
            keys: head_source::<E>(&inputs.key, head),
            values: head_source::<E>(&inputs.value, head),
            start,
            end_block: tile.end_block,
        };
        // `row` is the tile row of the score in the thread's first score register.
        let row = (roles.score_row + UNIT_POS % 32u32 / 4u32) as i32;
        let next_row = row + comptime!(FRAGMENT_ROWS as i32);
        let rows_0 = row_pair::<F, NB>(&tile, &scoring, row, kind);
        let rows_1 = row_pair::<F, NB>(&tile, &scoring, next_row, kind);
        if comptime!(tiles.holds_queries) {
            if assigned.first < tile.end_block {
                copy_queries::<E>(
                    &inputs.query,
                    &tile,
                    offsets.queries,
                    tiles.rows,
                    tiles.head_dim,
                    MmaSplitDTiles::UNITS,
                    kind,
                );
            }
        }
        let attended = run_mainloop::<E, F, NB, NS, AS, AO>(
            &assigned,
            &inputs.query,
            &rows_0,
            &rows_1,
            &scoring,
            &operands,
            &offsets,
            &roles,
            scale_log2,
            tiles,
            kind,
        );
        // Wait until all warps have read the last rescale factors, because `store_results` overwrites these factors.
        sync_cube();
        store_results::<AO>(&attended, &offsets, &roles, tiles);
        sync_cube();
        #[unroll]
        for fragment in 0..tiles.output_fragments() {
            let own_row = roles.output_row
                + comptime!((fragment * FRAGMENT_ROWS) as u32)
                + UNIT_POS % 32u32 / 4u32;
            let rows = row_pair::<F, NB>(&tile, &scoring, own_row as i32, kind);
            let outputs = output_rows(&tile, &rows, own_row as i32);
            let finished = finished::<AO, NO>(attended.o, &offsets, own_row, fragment, tiles);
            let part = normalised::<K, NO>(
                finished,
                &outputs,
                &sinks,
                logsumexp,
                roles.column_group == 0u32,
                &scoring.arguments,
                output_factor(&scoring.dropout, tiles.half),
                comptime!(16 * tiles.value_steps()),
                kind.fragment,
            );
            #[unroll]
            for step in 0..tiles.value_steps() {
                write_rows::<O, N, Const<STEP_REGISTERS>>(
                    step_of::<NO, Const<STEP_REGISTERS>>(part, step),
                    output,
                    &outputs,
                    first_column(&roles, step, tiles),
                    16usize,
                    tiles.value_dim,
                );
            }
        }
    }
}

/// Initializes the barriers of the ring buffer in shared memory, and the barriers of each row group. A row group is
/// `column_groups` warps that compute different columns of the same output rows.
#[cube]
fn make_barriers(start: u32, #[comptime] tiles: MmaSplitDTiles) {
    make_ring(
        start,
        comptime!(tiles.ring()),
        MmaSplitDTiles::UNITS,
        MmaSplitDTiles::WARPS,
    );
    let meetings = start + comptime!(tiles.meetings_at() as u32);
    #[unroll]
    for barrier in 0..comptime!(tiles.row_groups * MmaSplitDTiles::MEETING_BARRIERS / BARRIER_BYTES)
    {
        barrier_init(
            meetings + comptime!((barrier * BARRIER_BYTES) as u32),
            tiles.column_groups(),
        );
    }
}

/// Stores two f32 in shared memory for each of a warp's rows. The first f32 is the row maximum that the softmax has
/// subtracted, and the second f32 is the warp's partial row sum. The stores overwrite the rescale factors and the row
/// maxima of the last block.
#[cube]
fn store_results<AO: Size>(
    attended: &MainloopOutput<AO>,
    offsets: &SharedOffsets,
    roles: &Roles,
    #[comptime] tiles: MmaSplitDTiles,
) {
    let row = roles.score_row + UNIT_POS % 32u32 / 4u32;
    let sums = offsets.row_max_at + roles.key_group * comptime!(4 * tiles.rows as u32);
    #[unroll]
    for fragment in 0..tiles.score_fragments() {
        let state = if comptime!(fragment == 0) {
            attended.state_0
        } else {
            attended.state_1
        };
        let own_row = row + comptime!((fragment * FRAGMENT_ROWS) as u32);
        store_row_pair(quad_sum(state.sums), sums, own_row);
        if roles.key_group == 0u32 {
            store_row_pair(state.row_max.reference, offsets.factors, own_row);
        }
    }
}

/// Returns a fragment of the output. Also returns two f32 for each row of the fragment: the row maximum that the
/// softmax has subtracted, and the row sum. The row sum is the sum of the partial row sums of all key groups (32 keys
/// each), in the order of the keys.
#[cube]
fn finished<AO: Size, NO: Size>(
    all: Vector<f32, AO>,
    offsets: &SharedOffsets,
    row: u32,
    #[comptime] fragment: usize,
    #[comptime] tiles: MmaSplitDTiles,
) -> Finished<NO> {
    let mut o = Vector::<f32, NO>::zeroed();
    let count = comptime!(STEP_REGISTERS * tiles.value_steps());
    #[unroll]
    for i in 0..count {
        o.insert(i, all.extract(comptime!(fragment * count + i)));
    }
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    #[unroll]
    for group in 0..tiles.key_groups() {
        let own = load_row_pair(
            offsets.row_max_at + comptime!((4 * group * tiles.rows) as u32),
            row,
        );
        sum_0 += own.first;
        sum_1 += own.second;
    }
    Finished::<NO> {
        o,
        reference: load_row_pair(offsets.factors, row),
        sums: pair(sum_0, sum_1),
    }
}

/// Returns the first output column of the warp's `step`-th group of 16 columns.
#[cube]
fn first_column(roles: &Roles, #[comptime] step: usize, #[comptime] tiles: MmaSplitDTiles) -> u32 {
    let part = comptime!(step / tiles.part_steps());
    let own = comptime!(step % tiles.part_steps());
    roles.column_group * 16u32
        + comptime!((part * tiles.part_columns() + 16 * own * tiles.column_groups()) as u32)
}
