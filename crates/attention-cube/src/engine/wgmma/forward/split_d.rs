//! The forward on Hopper for values up to 512 wide: two warpgroups have the same 64 queries, and each has
//! half of the columns of their output.
//!
//! Budget. Shared memory ([`SplitDTiles::shared_memory`]), at head size 512: queries 64 KB, a ring of 8 × 16 KB,
//! two buffers of P with 16 KB each, the rows' maxima. Registers a thread: 128 of O, 32 of S. A block of 128
//! keys takes the tensor cores `4 head_dim + 4 value_dim` clocks, and the shared memory about 1.3 times that:
//! both warpgroups read all queries, and P comes from shared memory. That is the bound.
//!
//! Schedule. Keys come in chunks of 64 columns and values in chunks of 32 keys, alternately for either
//! warpgroup, through one ring, `K₀ K₁ V₀ K₂ V₁ …`. Each warpgroup has the scores of 64 of a block's keys;
//! the rows' maxima meet in shared memory, and P goes there for both. Block by block: issue `S' = Q K'ᵀ` of
//! the next; rescale O; issue `O += P V`; wait for S' alone; make P' of it while the matrix unit is at `P V`,
//! freeing the chunks of V on the way; wait for O.

mod halves;
mod pass;
mod producer;
mod zero_fill;

use self::pass::attend;
use self::producer::{fetch, places};
use super::scheduler::{init_notices, notice_bytes, notices_at, told_item};
use crate::engine::wgmma::chunked::Ring;
use crate::engine::wgmma::forward::copies::{Sources, Steps, zero_fill_other_queries};
use crate::engine::wgmma::output::{Target, write_tile};
use crate::engine::wgmma::plan::SplitDTiles;
use crate::fragment::scoring::scoring;
use crate::fragment::work_tile::{TileKind, TileScheduler, assigned_tile, row_pair};
use crate::math::schedule::{Grid, Schedule};
use crate::math::score::ScoreArguments;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::hopper::ptx::{
    barrier_arrive, barrier_init, barrier_init_fence, setmaxnreg_dec, setmaxnreg_inc,
    shared_address, store_shared, uniform,
};
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES, WARPGROUP};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Keys of a warpgroup's scores.
const HALF_KEYS: usize = SplitDTiles::KEYS / 2;

/// Threads that multiply.
const CONSUMERS: usize = SplitDTiles::WARPGROUPS * WARPGROUP;

/// Chunks of values of a warpgroup.
const OWN_CHUNKS: usize = SplitDTiles::KEYS / SplitDTiles::VALUE_KEYS;

/// Meetings of both warpgroups: the maxima are there; P is there.
const MAXIMA: u32 = 1;
const PROBABILITIES: u32 = 2;

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
    query: &TensorMap<E, Tiled>,
    key: &TensorMap<E, Tiled>,
    value: &TensorMap<E, Tiled>,
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
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
    #[comptime] stores_output_by_tma: bool,
    #[define(E)] _element: ElemType,
    #[define(O)] _output_element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(K)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NQ, NO)] _fragments: [usize; 3],
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
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.stages {
            let at = comptime!(8 * stage as u32);
            barrier_init(places.full + at, 1usize);
            // A warp of either warpgroup arrives once at a chunk of keys, a warp of one twice at one of values.
            barrier_init(places.empty + at, 8usize);
        }
        barrier_init(places.queries_full, 1usize);
        barrier_init(places.queries_empty, 8usize);
        init_notices(notices, 8usize, kind);
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
        SplitDTiles::ROWS,
        comptime!(tiles.key_chunks()),
        SplitDTiles::UNITS,
        kind,
    );
    sync_cube();

    if UNIT_POS >= comptime!(CONSUMERS as u32) {
        setmaxnreg_dec(24usize);
        if UNIT_POS == comptime!(CONSUMERS as u32) {
            let sources = Sources {
                query: tensor_map_address(query),
                key: tensor_map_address(key),
                value: tensor_map_address(value),
                steps,
            };
            fetch(&sources, masking, &scheduler, &places, notices, tiles, kind);
        }
    } else {
        setmaxnreg_inc(240usize);
        let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
        let lane = UNIT_POS % 32u32;
        // The row of the thread's first register, in the tile.
        let row = (UNIT_POS / 32u32 % 4u32 * 16u32 + lane / 4u32) as i32;
        let ring = Ring {
            full: places.full,
            empty: places.empty,
            elected: u32::cast_from(lane == 0u32),
        };
        // Where the queries were: both warpgroups are done with them since they exchanged the sums.
        let staging = places.queries
            + warpgroup * comptime!((tiles.value_subtiles() * PRODUCT_ROWS * ROW_BYTES) as u32);
        let first_column = warpgroup * comptime!(tiles.value_columns() as u32);
        let writes_logsumexp = warpgroup == 0u32;
        let target = Target {
            staging,
            map: tensor_map_address(output_tma_tiles),
            row,
            first_row: 0i32,
            first_column,
        };

        let mut item = CUBE_POS as u32;
        let mut turn = 0u32;
        let mut tiles_done = 0u32;
        let mut visited = 0u32;
        while item < scheduler.schedule.items {
            let assigned_tile = assigned_tile(
                &scheduler,
                item,
                turn,
                masking,
                SplitDTiles::ROWS,
                SplitDTiles::KEYS,
                kind,
            );
            if assigned_tile.exists {
                let tile = assigned_tile.tile;
                let rows = row_pair::<F, NB>(&tile, &scoring, row, kind);
                let attended = attend::<F, NB, NS, NQ, NO>(
                    &assigned_tile,
                    &rows,
                    &scoring,
                    &places,
                    ring,
                    tiles_done % 2u32,
                    visited,
                    power,
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
                    &arguments,
                    comptime!(tiles.output_shape(stores_output_by_tma)),
                    kind.fragment,
                );
                barrier_arrive(places.queries_empty, ring.elected);
                tiles_done += 1u32;
            }
            item = told_item(&scheduler.schedule, item, turn, notices, ring.elected, kind);
            turn += 1u32;
        }
    }
}
