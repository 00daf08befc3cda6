//! The forward for values up to 128 wide: each warp has 16 or 32 queries and all columns of their output.
//!
//! Budget. Shared memory ([`SplitMTiles::shared_memory`]): the queries, and two blocks of keys and of values. Registers a thread, at
//! head size 128 with 32 queries a warp and 32 keys: 128 of O, 32 of S, 16 of P. An `ldmatrix` of four matrices feeds four products of
//! 16 × 8 × 16 where a warp has 32 rows, and two where it has 16: on an H200 the matrix unit then reaches 577 to 604 TFLOP/s and 460,
//! of 646 alone, so shared memory bounds head size 128, and the exponentials 64.
//!
//! Schedule. A cube a tile, two cubes a multiprocessor: one multiplies while the other is at its softmax. All warps copy; a block's
//! copies start a block ahead, behind the one barrier of a block, which says that the last block has been read and the next is there.

mod pass;

use self::pass::attend;
use super::copies::sources;
use super::warp::warp_rows;
use crate::engine::mma::fragments::fragment_of;
use crate::engine::mma::plan::split_m::SplitMTiles;
use crate::fragment::output::{Finished, normalised, output_rows, write_rows};
use crate::fragment::scoring::scoring;
use crate::fragment::softmax::totals;
use crate::fragment::work_tile::{TileKind, TileScheduler, assigned_tile};
use crate::math::schedule::{Grid, Schedule};
use crate::math::score::ScoreArguments;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::hopper::ptx::{shared_address, uniform};
use cubecl::prelude::*;

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
    AS: Size,
    AP: Size,
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
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
    #[define(E)] _element: ElemType,
    #[define(O)] _output_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(K)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NP, NO, AS, AP, AO)] _vectors: [usize; 6],
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
        let tile = assigned.tile;
        let warp = uniform(UNIT_POS / 32u32);
        let warp_row = warp * comptime!(tiles.warp_rows() as u32);
        // The row of the thread's first register, in the tile.
        let row = (warp_row + UNIT_POS % 32u32 / 4u32) as i32;
        let rows = warp_rows::<F, NB>(&tile, &scoring, row, kind);
        let attended = attend::<E, F, NB, NS, NP, AS, AP, AO>(
            &sources::<E>(query, key, value),
            &tile,
            assigned.first,
            &rows,
            &scoring,
            start,
            warp_row,
            power,
            tiles,
            kind,
        );
        #[unroll]
        for fragment in 0..tiles.fragments {
            let rows = if comptime!(fragment == 0) {
                rows.first
            } else {
                rows.second
            };
            let state = if comptime!(fragment == 0) {
                attended.states.first
            } else {
                attended.states.second
            };
            let first = row + comptime!((fragment * FRAGMENT_ROWS) as i32);
            let places = output_rows(&tile, &rows, first);
            let finished = Finished::<NO> {
                o: fragment_of::<AO, NO>(attended.o, fragment),
                reference: state.row_max.reference,
                sums: totals(state.sums),
            };
            let part = normalised::<K, NO>(
                finished,
                &places,
                &sinks,
                logsumexp,
                true,
                &arguments,
                comptime!(tiles.warp().columns),
                kind.fragment,
            );
            write_rows::<O, N, NO>(
                part,
                output,
                &places,
                0u32,
                comptime!(tiles.warp().columns),
                tiles.value_dim,
            );
        }
    }
}
