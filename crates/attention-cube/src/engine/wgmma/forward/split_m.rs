//! The forward on Hopper for values up to 256 wide: each warpgroup has 64 queries and all columns of their
//! output.
//!
//! Budget. Shared memory ([`SplitMTiles::shared_memory`]): the queries, and a ring of `stages` blocks of keys
//! and of values. Registers a thread, at head size 256: 128 of O, 40 of S, 20 of P, and 20 of the next P
//! while S becomes it; `setmaxnreg` takes them from the warpgroup that only fetches. A block of `keys` keys
//! takes the tensor cores `rows · keys · (head_dim + value_dim) / 2048` clocks, and the shared memory a
//! little less (P stays in registers): the matrix unit bounds head sizes from 128 on, the exponentials 64.
//!
//! Schedule. One thread of the fetching warpgroup keeps the ring full; everybody else, block by block:
//! issue `S' = Q K'ᵀ` of the next block; rescale O; issue `O += P V`; wait for S'; make P' of it while the
//! matrix unit is at `P V`; wait for O. A stage is free when a lane of each warp has said so. Where warpgroups issue in turns,
//! all that a warpgroup can do before its turn is done there: each waits for the sum of all turns.

mod biases;
mod pass;
mod probabilities;
mod producer;
mod products;
mod zero_fill;

use self::pass::{Thread, Visited, attend};
use self::producer::{fetch, places};
use super::scheduler::{init_notices, notice_bytes, notices_at, told_item};
use crate::engine::wgmma::forward::copies::{Sources, Steps, zero_fill_other_queries};
use crate::engine::wgmma::output::{Target, write_tile};
use crate::engine::wgmma::plan::SplitMTiles;
use crate::fragment::scoring::scoring;
use crate::fragment::work_tile::{TileKind, TileScheduler, assigned_tile, row_pair};
use crate::math::schedule::{Grid, Schedule};
use crate::math::score::ScoreArguments;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::hopper::barriers::ordering_barrier_arrive;
use cube_kit::hopper::ptx::{
    barrier_arrive, barrier_init, barrier_init_fence, setmaxnreg_dec, setmaxnreg_inc,
    shared_address, store_shared, uniform,
};
use cube_kit::hopper::tma::await_stores;
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES, WARPGROUP};
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
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
    tma_bias: &TensorMap<E, Tiled>,
    mask: ComptimeOption<&Tensor<u32>>,
    bias: ComptimeOption<&Tensor<Vector<F, NB>>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    sinks: ComptimeOption<&Tensor<K>>,
    output_tma_tiles: &TensorMap<E, Tiled>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    grid: Grid,
    schedule: Schedule,
    extent: Extent,
    arguments: ScoreArguments,
    steps: Steps,
    mask_places: MaskPlaces,
    group: u32,
    power: f32,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
    #[comptime] stores_output_by_tma: bool,
    #[define(E)] _element: ElemType,
    #[define(O)] _output_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(K)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NP, NO)] _fragments: [usize; 3],
) {
    let scoring = scoring::<F, NB>(extent, lengths_and_ids, mask, mask_places, bias, arguments);
    let masking = &scoring.masking;
    let scheduler = TileScheduler {
        grid,
        schedule,
        group,
    };
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!((tiles.shared_memory() + notice_bytes(kind)) / 4),
        1024usize,
    );
    let start = shared_address(&memory);
    let places = places(start, tiles);
    let notices = notices_at(start, comptime!(tiles.shared_memory()), kind);
    let consumers = comptime!(tiles.warpgroups * WARPGROUP);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(places.key_full + at, 1usize);
            barrier_init(places.key_empty + at, comptime!(4 * tiles.warpgroups));
            barrier_init(places.value_full + at, 1usize);
            barrier_init(places.value_empty + at, comptime!(4 * tiles.warpgroups));
        }
        barrier_init(places.queries_full, 1usize);
        barrier_init(places.queries_empty, comptime!(4 * tiles.warpgroups));
        #[unroll]
        for turn in 0..3u32 {
            barrier_init(
                places.used_told + 8u32 * turn,
                comptime!(4 * tiles.warpgroups),
            );
        }
        #[unroll]
        for stage in 0..tiles.bias_stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(places.bias_full + at, 1usize);
            barrier_init(places.bias_empty + at, comptime!(4 * tiles.warpgroups));
        }
        init_notices(notices, comptime!(4 * tiles.warpgroups), kind);
        barrier_init_fence();
        if comptime!(kind.leaves_masked()) {
            #[unroll]
            for word in 0..12usize {
                store_shared(places.used + comptime!(4 * word as u32), 0u32);
            }
        }
    }
    zero_fill_other_queries(
        places.queries,
        &masking.extent,
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
                query: tensor_map_address(query),
                key: tensor_map_address(key),
                value: tensor_map_address(value),
                steps,
            };
            let bias_map = tensor_map_address(tma_bias);
            fetch(
                &sources, bias_map, masking, &scheduler, &places, notices, tiles, kind,
            );
        }
    } else {
        setmaxnreg_inc(comptime!(tiles.thread_registers()[1]));
        let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
        let lane = UNIT_POS % 32u32;
        let elected = u32::cast_from(lane == 0u32);
        let thread = Thread { warpgroup, elected };
        // The row of the thread's first register, in the tile.
        let row = (UNIT_POS / 32u32 * 16u32 + lane / 4u32) as i32;
        let target = Target {
            staging: places.output + warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32),
            row,
            first_row: (warpgroup * comptime!(PRODUCT_ROWS as u32)) as i32,
            first_column: 0u32,
            map: tensor_map_address(output_tma_tiles),
        };
        if comptime!(tiles.orders_warpgroups) {
            // The first turn is the first warpgroup's.
            if warpgroup == comptime!(tiles.warpgroups as u32 - 1) {
                ordering_barrier_arrive(warpgroup, tiles.warpgroups);
            }
        }

        let mut item = CUBE_POS as u32;
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
                let attended = attend::<F, NB, NS, NP, NO>(
                    &assigned_tile,
                    &rows,
                    &scoring,
                    &places,
                    thread,
                    tiles_done % 2u32,
                    Visited {
                        blocks: visited,
                        masked,
                    },
                    power,
                    tiles,
                    kind,
                );
                visited = attended.visited.blocks;
                masked = attended.visited.masked;
                // Queries are not read any more; a place that is shared with the output, not yet.
                if comptime!(tiles.has_output_place() || !stores_output_by_tma) {
                    barrier_arrive(places.queries_empty, elected);
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
                    &arguments,
                    comptime!(tiles.output_shape(stores_output_by_tma)),
                    kind.fragment,
                );
                if comptime!(!tiles.has_output_place() && stores_output_by_tma) {
                    barrier_arrive(places.queries_empty, elected);
                }
                tiles_done += 1u32;
            }
            item = told_item(&scheduler.schedule, item, turn, notices, elected, kind);
            turn += 1u32;
        }
        if comptime!(stores_output_by_tma) {
            await_stores();
        }
    }
}
