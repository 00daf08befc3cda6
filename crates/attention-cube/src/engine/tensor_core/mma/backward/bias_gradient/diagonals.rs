//! Sums dS along diagonals on tensor cores, for the gradient of a score mod's table.
//!
//! Algorithm. A *tile diagonal* consists of all square tiles with the same difference between query tile and key tile. A
//! score's place in such a tile determines its distance. A CTA therefore adds the dS of all tiles of a tile diagonal in the
//! same registers, as for a bias that is broadcast. At the end, it sums the registers of each distance. The order of
//! all additions is fixed, so results are bitwise equal in every run.
//!
//! Tensors. The operands of the bias gradient, and `sums [splits · batch, q_heads, tile diagonals, 128]` in f32. Element
//! `i` of the last dimension sums the scores whose query lies `i − 63` positions after the key, within a tile. Element
//! 127 is 0.
//!
//! Budget and schedule. Those of the bias gradient. The last sums need a tile in shared memory, in f32.
//!
//! Bound. Two GEMMs over all scores, while the rest of the backward computes seven.

use super::block_range::Visits;
use super::load::operands;
use super::{BiasGradientOperands, BiasGrid, sum_visits};
use crate::auxiliary::table_gradient::diagonals::{TILE, tile_difference};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use crate::math::schedule::{block_count, work_tile};
use crate::math::visibility::seq_info;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::nvidia::ptx::{load_shared, shared_address, store_shared, uniform};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn diagonal_sums<E: Float, F: Float, NB: Size, NS: Size, NP: Size, AS: Size>(
    inputs: BiasGradientOperands<E>,
    scoring: Scoring<F, NB>,
    sums: &mut Tensor<f32>,
    bias_grid: BiasGrid,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: TileKind,
    #[define(E, F)] _elements: [ElemType; 2],
    #[define(NB, NS, NP, AS)] _sizes: [usize; 4],
) {
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
    let index = CUBE_POS as u32;
    if index < bias_grid.grid.cubes {
        let own = work_tile(&bias_grid.grid, index, false);
        let size = comptime!(tiles.columns as i32);
        let seq_lens = &scoring.masking.seq_lens;
        let difference = tile_difference(own.tile, seq_lens.kv_len);
        let first_query = max(difference, 0i32);
        let first_key = max(-difference, 0i32);
        let tiles_of_diagonal = min(
            block_count(seq_lens.q_len, size) - first_query,
            block_count(seq_lens.kv_len, size) - first_key,
        );
        // Without this test, the CTA would search all tiles of a diagonal that the window hides.
        let info = seq_info(
            seq_lens,
            &scoring.masking.lengths_and_ids,
            own.batch,
            kind.fragment.structure,
        );
        let distance = difference * size + info.offset;
        let hidden = distance - (size - 1i32) > info.left || distance + size - 1i32 < -info.right;
        let count = select(hidden, 0i32, tiles_of_diagonal);
        let mut found = Vector::<f32, AS>::zeroed();
        if count > 0i32 {
            let visits = Visits {
                query_tile: first_query as u32,
                key_tile: first_key,
                head: own.head,
                batch: own.batch,
                query_tiles: count as u32,
                heads: 1u32.runtime(),
                group: bias_grid.group,
                count: count as u32,
                step: bias_grid.grid.splits,
                along_diagonal: true,
            };
            let operands = operands::<E>(
                &inputs.query,
                &inputs.key,
                &inputs.value,
                &inputs.output_gradient,
            );
            let warp_row = uniform(UNIT_POS / 32u32) * comptime!(tiles.warp_rows() as u32);
            found = sum_visits::<E, F, NB, NS, NP, AS>(
                &operands,
                &inputs.lse_delta,
                &visits,
                own.split,
                warp_row,
                &scoring,
                start,
                tiles,
                kind,
            );
        }
        let sum = sum_of_distance::<AS>(found, start, tiles);
        let part = own.split * bias_grid.batches + own.batch;
        let at = part as usize * sums.stride(0)
            + own.head as usize * sums.stride(1)
            + own.tile as usize * sums.stride(2);
        sums[at + UNIT_POS as usize] = sum;
    }
}

/// Returns the sum of the tile's elements whose query is `UNIT_POS − 63` positions after the key, within the tile.
#[cube]
fn sum_of_distance<AS: Size>(
    sums: Vector<f32, AS>,
    start: u32,
    #[comptime] tiles: BiasGradientTiles,
) -> f32 {
    let size = comptime!(tiles.columns as i32);
    // One word more than the columns, so that the words that a warp reads together lie in different banks.
    let row_bytes = comptime!(4 * (tiles.columns as u32 + 1));
    comptime!(assert!(
        tiles.rows() == tiles.columns
            && tiles.columns == TILE
            && tiles.units() == 2 * tiles.columns
            && 4 * tiles.rows() * (tiles.columns + 1) <= tiles.shared_memory(),
        "each unit sums a diagonal of a square tile in shared memory"
    ));
    // Wait until all warps have read the last chunk, since the sums overwrite that chunk in shared memory.
    sync_cube();
    let lane = UNIT_POS % 32u32;
    let first_row = UNIT_POS / 32u32 * comptime!(tiles.warp_rows() as u32) + lane / 4u32;
    #[unroll]
    for fragment in 0..tiles.fragments {
        #[unroll]
        for block in 0..comptime!(tiles.columns / 8) {
            #[unroll]
            for i in 0..4usize {
                let row = first_row + comptime!((fragment * FRAGMENT_ROWS + i / 2 * 8) as u32);
                let column = lane % 4u32 * 2u32 + comptime!((8 * block + i % 2) as u32);
                let register = comptime!(fragment * tiles.vectors()[0] + 4 * block + i);
                store_shared(
                    start + row * row_bytes + column * 4u32,
                    u32::reinterpret(sums.extract(register)),
                );
            }
        }
    }
    sync_cube();
    let distance = UNIT_POS as i32 + 1i32 - size;
    let mut row = max(distance, 0i32);
    let end = min(size + distance, size);
    let mut sum = f32::new(0.0);
    while row < end {
        let column = row - distance;
        sum += f32::reinterpret(load_shared(
            start + row as u32 * row_bytes + column as u32 * 4u32,
        ));
        row += 1i32;
    }
    sum
}
