//! The split-N forward for few rows (decoding, and verification of draft tokens). Every warp processes all rows of the
//! tile, but only some of the keys.
//!
//! Tensors:
//!
//! - Query `[batch, q_heads, q_len, head_dim]`, f16 or bf16.
//! - Keys `[batch, kv_heads, kv_len, head_dim]` and values `[batch, kv_heads, kv_len, value_dim]`, in the query's dtype.
//! - Alternatively, keys and values as 8-bit codes, packed four to a `u32`, with scales `[batch, kv_heads, kv_len]`, f32.
//! - Alternatively, pages of keys and values: the first dimension counts pages, and a page table lists the pages of each
//!   sequence.
//! - Output `[splits · batch, q_heads, q_len, value_dim]`, f32 if there are several splits.
//! - Logsumexp `[2 · splits · batch, q_heads, q_len]`, f32. The first half of the tensor holds the row maxima, the second
//!   half the natural logarithms of the row sums.
//!
//! Budget. The sizes are for head size 128 with 16 rows. Shared memory ([`MmaSplitNTiles::shared_memory`]) holds 4 KB
//! of queries and 96 KB of keys and values: three stages for each of 4 warps, with 16 keys and values per stage. A
//! thread uses 64 registers for O and 8 for S. At head size 256, a thread uses 128 registers for O. At head size 512,
//! two warps share the keys. Each of the two warps then has 256 columns of every operand, and each of its threads uses
//! 128 registers for O.
//!
//! Bound. Memory bandwidth limits the kernel. Each byte from memory is written to shared memory once and read from
//! shared memory once. Together with the reads of the queries, these accesses take 50 of the 128 bytes per clock of an
//! H200's shared memory. The number of bytes in flight decides the speed. The kernel keeps 64 to 128 KB in flight per
//! multiprocessor.
//!
//! Codes. A block of [quantized](crate::quantized) keys and values has half the bytes of a bf16 block. Codes become
//! bf16 in registers, with 7 instructions per four codes. Each lane holds the scales of a block in two registers, and
//! prefetches the scales of the next block into two more registers. The columns of the queries are reordered once, into
//! the order in which lanes hold codes. At head size 512, each byte from memory causes on average 3 bytes of
//! shared-memory traffic: 4 bytes for a byte of keys (together with the queries), and 2 bytes for a byte of values. For
//! 1 GB of keys and values, this traffic takes 0.11 ms at 28 TB/s. The reads from memory take 0.25 ms at 4 TB/s.
//!
//! Schedule. Each CTA has one tile and one split of the keys. If heads share a tile, each key is read once for all
//! these heads. A *key group* is one or two warps. The CTA has `key_groups` key groups, and each key group processes
//! every `key_groups`-th block. Each warp copies its own operands, so groups do not wait for each other during the main
//! loop. In a group of two warps, each warp sums `q·k` over half of the columns, and the warps exchange their partial
//! scores. At the end, the groups rescale their outputs to the largest row maxima. Each warp then sums the outputs of
//! all groups for some of the columns, in the order of the groups.
//!
//! Pages. A block lies in one page. The warp looks up a block's page one iteration before it starts the block's copies.
//!
//! With `lengths_ahead`, the kernel loads the sequence length before the previous launch has ended (PDL). The previous
//! launch does not write the length, so the early load is safe.

mod mainloop;
mod merge;
mod pages;
mod scales;
mod stages;

use self::mainloop::run_mainloop;
use self::merge::{Tables, put_together, store_results};
use self::pages::{first_sequence, page_sources};
use self::scales::scale_sources;
use self::stages::{Operands, copy_all_queries, warp_roles};
use super::load::{HeadRows, head_source};
use super::warp::warp_rows;
use crate::engine::tensor_core::common::dropout::output_factor;
use crate::engine::tensor_core::common::output::{
    STEP_REGISTERS, normalised, output_rows, step_of, write_fours, write_rows,
};
use crate::engine::tensor_core::common::scoring::ForwardOperands;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::tile_scheduler::{TileKind, TileScheduler, assigned_tile};
use crate::engine::tensor_core::mma::plan::split_n::MmaSplitNTiles;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::nvidia::ptx::shared_address;
use cube_kit::pdl::{
    launch_dependents, mark_owned_volatile_if_present, mark_volatile, wait_prior_launch,
};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_split_n_pdl<
    E: Float,
    W: Numeric,
    O: Float,
    F: Float,
    K: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NP: Size,
    NO: Size,
    AS: Size,
    AP: Size,
    AO: Size,
>(
    inputs: ForwardOperands<E, W>,
    scoring: Scoring<F, NB>,
    sinks: ComptimeOption<OwnedTensor<K>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    scheduler: TileScheduler,
    scale_log2: f32,
    #[comptime] tiles: MmaSplitNTiles,
    #[comptime] kind: TileKind,
    #[comptime] pdl: bool,
    #[define(E, W, O, F, K)] _elements: [ElemType; 5],
    #[define(N, NB, NS, NP, NO, AS, AP, AO)] _sizes: [usize; 8],
) {
    launch_dependents(pdl);
    let ahead = comptime!(kind.fragment.structure.lengths_ahead);
    let first = comptime!(pdl && !ahead);
    wait_prior_launch(first);
    mark_owned_volatile_if_present(&scoring.masking.mask, first);
    mark_owned_volatile_if_present(&scoring.masking.lengths_and_ids, first);
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
    let item = CUBE_POS as u32;
    if item < scheduler.schedule.items {
        let assigned = assigned_tile(
            &scheduler,
            item,
            0u32,
            masking,
            comptime!(tiles.rows()),
            tiles.keys,
            kind,
        );
        wait_prior_launch(ahead);
        mark_volatile(&inputs.query, pdl);
        mark_volatile(&inputs.key, pdl);
        mark_volatile(&inputs.value, pdl);
        mark_owned_volatile_if_present(&inputs.key_scales, pdl);
        mark_owned_volatile_if_present(&inputs.value_scales, pdl);
        mark_owned_volatile_if_present(&inputs.page_table, pdl);
        mark_owned_volatile_if_present(&scoring.bias, pdl);
        mark_owned_volatile_if_present(&scoring.tables.score.elements, pdl);
        mark_owned_volatile_if_present(&scoring.tables.mask.elements, pdl);
        mark_owned_volatile_if_present(&sinks, pdl);
        let tile = assigned.tile;
        let roles = warp_roles(start, tiles);
        // `row` is the tile row of the element in the thread's first register.
        let row = (UNIT_POS % 32u32 / 4u32) as i32;
        let rows = warp_rows::<F, NB>(&tile, &scoring, row, kind);
        let head = HeadRows {
            batch: first_sequence(tile.batch, kind),
            head: tile.kv_head,
            first: tile.keys.first,
            end: min(tile.keys.end, masking.seq_lens.kv_len),
        };
        let operands = Operands {
            keys: head_source::<W>(&inputs.key, head),
            values: head_source::<W>(&inputs.value, head),
            scales: scale_sources(&inputs.key_scales, &inputs.value_scales, head),
            pages: page_sources::<E, W>(&inputs, tile.batch),
            end_block: tile.end_block,
        };
        copy_all_queries::<E>(&inputs.query, &tile, start, tiles, kind);
        let attended = run_mainloop::<F, NB, NS, NP, AS, AP, AO>(
            &assigned, &rows, &scoring, &operands, &roles, start, scale_log2, tiles, kind,
        );
        let tables = Tables {
            references: start + comptime!(tiles.references_at() as u32),
            sums: start + comptime!(tiles.sums_at() as u32),
        };
        let hidden = scoring.arguments.negative_infinity;
        store_results::<AO>(&attended, &tables, &roles, scale_log2, hidden, tiles);
        #[unroll]
        for fragment in 0..tiles.fragments {
            let rows = if comptime!(fragment == 0) {
                rows.first
            } else {
                rows.second
            };
            let first = row + comptime!((fragment * FRAGMENT_ROWS) as i32);
            let offsets = output_rows(&tile, &rows, first);
            let finished = put_together::<NO>(&tables, &roles, scale_log2, hidden, fragment, tiles);
            let part = normalised::<K, NO>(
                finished,
                &offsets,
                &sinks,
                logsumexp,
                roles.warp == 0u32,
                &scoring.arguments,
                output_factor(&scoring.dropout, tiles.half),
                comptime!(16 * tiles.part_steps()),
                kind.fragment,
            );
            #[unroll]
            for own in 0..tiles.part_steps() {
                let step = roles.first_step + comptime!(own as u32);
                if step < comptime!(tiles.warp().steps() as u32) {
                    let of_step = step_of::<NO, Const<STEP_REGISTERS>>(part, own);
                    let column = roles.value_column + 16u32 * step;
                    if comptime!(tiles.codes.is_some()) {
                        write_fours::<O, N>(of_step, output, &offsets, column, tiles.value_dim);
                    } else {
                        write_rows::<O, N, Const<STEP_REGISTERS>>(
                            of_step,
                            output,
                            &offsets,
                            column,
                            16usize,
                            tiles.value_dim,
                        );
                    }
                }
            }
        }
    }
}
