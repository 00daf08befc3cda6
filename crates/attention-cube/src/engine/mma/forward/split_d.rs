//! The forward for values up to 512 wide: a block's scores are divided among the warps by rows and keys, and the tile's output by rows
//! and columns.
//!
//! Budget. Shared memory ([`SplitDTiles::shared_memory`]), at head size 512 with 227 KB: queries 64 KB, P of a block 16 KB, a ring of
//! 4 × 32 KB. Registers a thread: 128 of O, 32 of S. A block of 128 keys takes an H200's matrix unit 6,300 clocks, and the shared
//! memory 8,500: 4,100 for the operands of scores, 32 × 32 a warp, 2,000 for those of the output, 64 × 64 a warp, and 2,000 for what
//! the copies write. That is the bound; where the matrix unit is slower, as on cards for games, it bounds the kernel itself.
//!
//! Schedule. Keys come in chunks of columns and values in chunks of keys through one ring, `K₀ K₁ V₀ K₂ V₁ … Vₙ`; all warps copy and
//! multiply, and barriers tell of each slot whether it is full and whether it is empty. A pass multiplies by a block's keys, tells the
//! rows' maxima, and then multiplies P of the block before by its values. Meanwhile P of this block is made: by half of the warps before
//! their first values, by the others after these, so that the exponentials of one warp of a scheduler hide behind the products of the
//! other. The warps that have the same rows tell each other, by barriers of their own, that their maxima are there, that P is, and, where
//! there is room for one block's P alone, that they are done with the last one: it stays in registers until then.

mod chunks;
mod pass;
mod roles;
mod weights;

use self::chunks::Operands;
use self::pass::{Attended, attend};
use self::roles::{Roles, warp_roles};
use super::copies::{HeadRows, copy_queries, head_source};
use crate::engine::mma::fragments::{tell_rows, told_rows};
use crate::engine::mma::plan::split_d::SplitDTiles;
use crate::engine::mma::ring::make_ring;
use crate::fragment::output::{
    Finished, STEP_REGISTERS, normalised, output_rows, step_of, write_rows,
};
use crate::fragment::scoring::scoring;
use crate::fragment::softmax::totals;
use crate::fragment::work_tile::{TileKind, TileScheduler, assigned_tile, row_pair};
use crate::math::schedule::{Grid, Schedule};
use crate::math::score::ScoreArguments;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::ampere::{BARRIER_BYTES, FRAGMENT_ROWS};
use cube_kit::hopper::accumulator::pair;
use cube_kit::hopper::ptx::{barrier_init, shared_address};
use cubecl::prelude::*;

/// Where everything lies in shared memory, but for the ring.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Places {
    queries: u32,
    probabilities: u32,
    maxima: u32,
    factors: u32,
    moved: u32,
    used: u32,
    /// The barriers of the warp's row group.
    meetings: u32,
}

#[cube]
fn places(start: u32, roles: &Roles, #[comptime] tiles: SplitDTiles) -> Places {
    Places {
        queries: start,
        probabilities: start + comptime!(tiles.probabilities_at() as u32),
        maxima: start + comptime!(tiles.maxima_at() as u32),
        factors: start + comptime!(tiles.factors_at() as u32),
        moved: start + comptime!(tiles.moved_at() as u32),
        used: start + comptime!(tiles.used_at() as u32),
        meetings: start
            + comptime!(tiles.meetings_at() as u32)
            + roles.row_group * comptime!(SplitDTiles::MEETING_BARRIERS as u32),
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
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
    query: &Tensor<E>,
    key: &Tensor<E>,
    value: &Tensor<E>,
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
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
    #[define(E)] _element: ElemType,
    #[define(O)] _output_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(K)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NO, AS, AO)] _vectors: [usize; 4],
) {
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
    if UNIT_POS == 0u32 {
        make_barriers(start, tiles);
    }
    sync_cube();
    let item = CUBE_POS as u32;
    if item < scheduler.schedule.items {
        let assigned = assigned_tile(
            &scheduler, item, 0u32, masking, tiles.rows, tiles.keys, kind,
        );
        let tile = assigned.tile;
        let roles = warp_roles(tiles);
        let places = places(start, &roles, tiles);
        let head = HeadRows {
            batch: tile.batch,
            head: tile.kv_head,
            first: tile.keys.first,
            end: min(tile.keys.end, masking.extent.kv_len),
        };
        let operands = Operands {
            keys: head_source::<E>(key, head),
            values: head_source::<E>(value, head),
            start,
            end_block: tile.end_block,
        };
        // The rows of the thread's first registers of scores, in the tile.
        let row = (roles.score_row + UNIT_POS % 32u32 / 4u32) as i32;
        let next_row = row + comptime!(FRAGMENT_ROWS as i32);
        let rows_0 = row_pair::<F, NB>(&tile, &scoring, row, kind);
        let rows_1 = row_pair::<F, NB>(&tile, &scoring, next_row, kind);
        if comptime!(tiles.holds_queries) {
            if assigned.first < tile.end_block {
                copy_queries::<E>(
                    query,
                    &tile,
                    places.queries,
                    tiles.rows,
                    tiles.head_dim,
                    SplitDTiles::UNITS,
                    kind,
                );
            }
        }
        let attended = attend::<E, F, NB, NS, AS, AO>(
            &assigned, query, &rows_0, &rows_1, &scoring, &operands, &places, &roles, power, tiles,
            kind,
        );
        // All have read the last factors.
        sync_cube();
        tell_results::<AO>(&attended, &places, &roles, tiles);
        sync_cube();
        #[unroll]
        for fragment in 0..tiles.output_fragments() {
            let own_row = roles.output_row
                + comptime!((fragment * FRAGMENT_ROWS) as u32)
                + UNIT_POS % 32u32 / 4u32;
            let rows = row_pair::<F, NB>(&tile, &scoring, own_row as i32, kind);
            let outputs = output_rows(&tile, &rows, own_row as i32);
            let finished = finished::<AO, NO>(attended.o, &places, own_row, fragment, tiles);
            let part = normalised::<K, NO>(
                finished,
                &outputs,
                &sinks,
                logsumexp,
                roles.column_group == 0u32,
                &arguments,
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

/// Makes the barriers of the ring, and of each row group, whose warps are as many as have turns at the columns.
#[cube]
fn make_barriers(start: u32, #[comptime] tiles: SplitDTiles) {
    make_ring(
        start,
        comptime!(tiles.ring()),
        SplitDTiles::UNITS,
        SplitDTiles::WARPS,
    );
    let meetings = start + comptime!(tiles.meetings_at() as u32);
    #[unroll]
    for barrier in 0..comptime!(tiles.row_groups * SplitDTiles::MEETING_BARRIERS / BARRIER_BYTES) {
        barrier_init(
            meetings + comptime!((barrier * BARRIER_BYTES) as u32),
            tiles.column_groups(),
        );
    }
}

/// Tells all warps the references and the sums of a warp's rows, in place of factors and maxima.
#[cube]
fn tell_results<AO: Size>(
    attended: &Attended<AO>,
    places: &Places,
    roles: &Roles,
    #[comptime] tiles: SplitDTiles,
) {
    let row = roles.score_row + UNIT_POS % 32u32 / 4u32;
    let sums = places.maxima + roles.key_group * comptime!(4 * tiles.rows as u32);
    #[unroll]
    for fragment in 0..tiles.score_fragments() {
        let state = if comptime!(fragment == 0) {
            attended.state_0
        } else {
            attended.state_1
        };
        let own_row = row + comptime!((fragment * FRAGMENT_ROWS) as u32);
        tell_rows(totals(state.sums), sums, own_row);
        if roles.key_group == 0u32 {
            tell_rows(state.row_max.reference, places.factors, own_row);
        }
    }
}

/// A fragment of the output, with what all warps told of its rows. Their sums are added in the order of the keys.
#[cube]
fn finished<AO: Size, NO: Size>(
    all: Vector<f32, AO>,
    places: &Places,
    row: u32,
    #[comptime] fragment: usize,
    #[comptime] tiles: SplitDTiles,
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
        let own = told_rows(
            places.maxima + comptime!((4 * group * tiles.rows) as u32),
            row,
        );
        sum_0 += own.first;
        sum_1 += own.second;
    }
    Finished::<NO> {
        o,
        reference: told_rows(places.factors, row),
        sums: pair(sum_0, sum_1),
    }
}

/// The first of a warp's `step`-th 16 columns.
#[cube]
fn first_column(roles: &Roles, #[comptime] step: usize, #[comptime] tiles: SplitDTiles) -> u32 {
    let part = comptime!(step / tiles.part_steps());
    let own = comptime!(step % tiles.part_steps());
    roles.column_group * 16u32
        + comptime!((part * tiles.part_columns() + 16 * own * tiles.column_groups()) as u32)
}
