//! The split-M forward, for value sizes up to 128. Each warp has 16 or 32 queries, and computes all columns of the
//! output of these queries.
//!
//! Tensors:
//!
//! - Query `[batch, q_heads, q_len, head_dim]`, f16 or bf16.
//! - Keys `[batch, kv_heads, kv_len, head_dim]` and values `[batch, kv_heads, kv_len, value_dim]`, in the query's dtype.
//! - Output `[splits · batch, q_heads, q_len, value_dim]`, f32 if there are several splits.
//! - Logsumexp `[2 · splits · batch, q_heads, q_len]`, f32. The first half of the tensor holds the row maxima, the second
//!   half the natural logarithms of the row sums.
//!
//! Budget. Shared memory ([`MmaSplitMTiles::shared_memory`]) holds the queries, two blocks of keys, and two blocks of
//! values. The register counts are for head size 128, 32 queries per warp and 32 keys per block. A thread uses 128 registers
//! for O, 32 for S and 16 for P.
//!
//! Bound. The bandwidth of shared memory limits the kernel at head size 128, and the exponentials limit it at head size
//! 64. On an H200, `mma` instructions and the `ldmatrix` that load their operands reach 577 to 604 TFLOP/s with 32 rows
//! per warp. With 16 rows per warp, they reach 460 TFLOP/s. Without the loads, `mma` instructions reach 646 TFLOP/s.
//!
//! Schedule. Each CTA has one tile, and two CTAs share a multiprocessor: one CTA multiplies while the other CTA
//! computes its softmax. All warps copy operands. While the warps multiply one block, the copies of the next block are
//! in flight. The CTA passes one barrier per block. After the barrier, all warps have read the previous block, and the
//! copies of the current block have completed.

mod mainloop;

use self::mainloop::run_mainloop;
use super::load::sources;
use super::warp::warp_rows;
use crate::engine::tensor_core::common::dropout::output_factor;
use crate::engine::tensor_core::common::output::{Finished, normalised, output_rows, write_rows};
use crate::engine::tensor_core::common::scoring::ForwardOperands;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::softmax::quad_sum;
use crate::engine::tensor_core::common::tile_scheduler::{
    TileKind, TileScheduler, assigned_tile, ordered_item,
};
use crate::engine::tensor_core::mma::fragments::fragment_of;
use crate::engine::tensor_core::mma::plan::split_m::MmaSplitMTiles;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::nvidia::ptx::{shared_address, uniform};
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
    inputs: ForwardOperands<E, E>,
    scoring: Scoring<F, NB>,
    sinks: ComptimeOption<OwnedTensor<K>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    scheduler: TileScheduler,
    scale_log2: f32,
    #[comptime] tiles: MmaSplitMTiles,
    #[comptime] kind: TileKind,
    #[define(E, O, F, K)] _elements: [ElemType; 4],
    #[define(N, NB, NS, NP, NO, AS, AP, AO)] _sizes: [usize; 8],
) {
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
    let item = ordered_item(&scheduler, CUBE_POS as u32, masking, kind);
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
        // `row` is the tile row of the element in the thread's first register.
        let row = (warp_row + UNIT_POS % 32u32 / 4u32) as i32;
        let rows = warp_rows::<F, NB>(&tile, &scoring, row, kind);
        let attended = run_mainloop::<E, F, NB, NS, NP, AS, AP, AO>(
            &sources::<E>(&inputs.query, &inputs.key, &inputs.value),
            &tile,
            assigned.first,
            &rows,
            &scoring,
            start,
            warp_row,
            scale_log2,
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
            let offsets = output_rows(&tile, &rows, first);
            let finished = Finished::<NO> {
                o: fragment_of::<AO, NO>(attended.o, fragment),
                reference: state.row_max.reference,
                sums: quad_sum(state.sums),
            };
            let part = normalised::<K, NO>(
                finished,
                &offsets,
                &sinks,
                logsumexp,
                true,
                &scoring.arguments,
                output_factor(&scoring.dropout, tiles.half),
                comptime!(tiles.warp().columns),
                kind.fragment,
            );
            write_rows::<O, N, NO>(
                part,
                output,
                &offsets,
                0u32,
                comptime!(tiles.warp().columns),
                tiles.value_dim,
            );
        }
    }
}
