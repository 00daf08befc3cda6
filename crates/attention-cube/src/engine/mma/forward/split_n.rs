//! The forward for few rows, as decoding and verification have them: every warp has all rows of the tile, and keys of its own.
//!
//! Budget. Shared memory ([`SplitNTiles::shared_memory`]), at head size 128 with 16 rows: queries 4 KB, and for each of 4 warps three blocks
//! of 16 keys and values, 96 KB. Registers a thread: 64 of O, 8 of S; at head size 256 128 of O. At 512 two warps share the keys and have
//! 256 columns of every operand each, 128 of O. Bound by memory: a byte from there is written to shared memory and read once, with
//! half as many for the queries, 50 of the 128 bytes a clock on an H200. What counts is how much is on its way: 64 to 128 KB a
//! multiprocessor.
//!
//! Of keys and values [in int8](crate::quantized) blocks have half of the bytes, and codes become bf16 in registers, 7 instructions for four of
//! them. Two registers a lane have the scales of a block, and two those of the next, which are read meanwhile; the queries change places once.
//! A byte from memory is written and read once as before, and at head size 512 two bytes of queries are read for each of keys: 3 bytes
//! for one on average, 0.11 of 0.25 ms at 4 TB/s and 28 TB/s of shared memory.
//!
//! Schedule. A cube a tile and part of the keys; where heads share a tile, each key is read once for all of them. A group of warps takes
//! every so many-th block. A warp copies what it multiplies, so that its warps never wait for each other: two of a group exchange their
//! scores, which are sums over each one's columns. In the end the groups bring their outputs to the rows' largest references, and
//! each warp adds up columns of all of them, in the order of the groups. Reads that wait for each other: queries, keys and values, and
//! before them a sequence's length, which is read before the launch before has ended where it was there before.

mod merge;
mod pass;
mod scales;
mod stages;

use self::merge::{Tables, put_together, tell_results};
use self::pass::attend;
use self::scales::scale_sources;
use self::stages::{Operands, copy_all_queries, warp_roles};
use super::copies::{HeadRows, head_source};
use super::warp::warp_rows;
use crate::engine::mma::plan::split_n::SplitNTiles;
use crate::fragment::output::{
    STEP_REGISTERS, normalised, output_rows, step_of, write_fours, write_rows,
};
use crate::fragment::scoring::scoring;
use crate::fragment::work_tile::{TileKind, TileScheduler, assigned_tile};
use crate::math::schedule::{Grid, Schedule};
use crate::math::score::ScoreArguments;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::hopper::ptx::shared_address;
use cube_kit::overlap::{await_previous, let_next_begin, was_written, was_written_if_there};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn forward_split_n_overlapped<
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
    query: &Tensor<E>,
    key: &Tensor<W>,
    value: &Tensor<W>,
    key_scales: ComptimeOption<&Tensor<f32>>,
    value_scales: ComptimeOption<&Tensor<f32>>,
    mask: ComptimeOption<&Tensor<u32>>,
    bias: ComptimeOption<&Tensor<Vector<F, NB>>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    sinks: ComptimeOption<&Tensor<K>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    grid: Grid,
    schedule: Schedule,
    extent: Extent,
    arguments: ScoreArguments,
    mask_places: MaskPlaces,
    group: u32,
    power: f32,
    #[comptime] tiles: SplitNTiles,
    #[comptime] kind: TileKind,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(W)] _key_element: ElemType,
    #[define(O)] _output_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(K)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NP, NO, AS, AP, AO)] _vectors: [usize; 6],
) {
    let_next_begin(overlaps);
    let ahead = comptime!(kind.fragment.structure.lengths_ahead);
    let first = comptime!(overlaps && !ahead);
    await_previous(first);
    was_written_if_there(mask, first);
    was_written_if_there(lengths_and_ids, first);
    let scoring = scoring::<F, NB>(extent, lengths_and_ids, mask, mask_places, bias, arguments);
    let masking = &scoring.masking;
    let scheduler = TileScheduler {
        grid,
        schedule,
        group,
    };
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
        await_previous(ahead);
        was_written(query, overlaps);
        was_written(key, overlaps);
        was_written(value, overlaps);
        was_written_if_there(key_scales, overlaps);
        was_written_if_there(value_scales, overlaps);
        was_written_if_there(bias, overlaps);
        was_written_if_there(sinks, overlaps);
        let tile = assigned.tile;
        let roles = warp_roles(start, tiles);
        // The row of the thread's first register, in the tile.
        let row = (UNIT_POS % 32u32 / 4u32) as i32;
        let rows = warp_rows::<F, NB>(&tile, &scoring, row, kind);
        let head = HeadRows {
            batch: tile.batch,
            head: tile.kv_head,
            first: tile.keys.first,
            end: min(tile.keys.end, masking.extent.kv_len),
        };
        let operands = Operands {
            keys: head_source::<W>(key, head),
            values: head_source::<W>(value, head),
            scales: scale_sources(key_scales, value_scales, head),
            end_block: tile.end_block,
        };
        copy_all_queries::<E>(query, &tile, start, tiles, kind);
        let attended = attend::<F, NB, NS, NP, AS, AP, AO>(
            &assigned, &rows, &scoring, &operands, &roles, start, power, tiles, kind,
        );
        let tables = Tables {
            references: start + comptime!(tiles.references_at() as u32),
            sums: start + comptime!(tiles.sums_at() as u32),
        };
        let hidden = arguments.negative_infinity;
        tell_results::<AO>(&attended, &tables, &roles, power, hidden, tiles);
        #[unroll]
        for fragment in 0..tiles.fragments {
            let rows = if comptime!(fragment == 0) {
                rows.first
            } else {
                rows.second
            };
            let first = row + comptime!((fragment * FRAGMENT_ROWS) as i32);
            let places = output_rows(&tile, &rows, first);
            let finished = put_together::<NO>(&tables, &roles, power, hidden, fragment, tiles);
            let part = normalised::<K, NO>(
                finished,
                &places,
                &sinks,
                logsumexp,
                roles.warp == 0u32,
                &arguments,
                comptime!(16 * tiles.part_steps()),
                kind.fragment,
            );
            #[unroll]
            for own in 0..tiles.part_steps() {
                let step = roles.first_step + comptime!(own as u32);
                if step < comptime!(tiles.warp().steps() as u32) {
                    let of_step = step_of::<NO, Const<STEP_REGISTERS>>(part, own);
                    let column = roles.value_column + 16u32 * step;
                    if comptime!(tiles.reads_words) {
                        write_fours::<O, N>(of_step, output, &places, column, tiles.value_dim);
                    } else {
                        write_rows::<O, N, Const<STEP_REGISTERS>>(
                            of_step,
                            output,
                            &places,
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
