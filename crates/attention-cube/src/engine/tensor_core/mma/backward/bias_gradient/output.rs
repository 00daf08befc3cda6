//! The writes of the summed bias gradient to global memory.

use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use crate::math::rounding::rounded_vector;
use cube_kit::nvidia::ptx::{load_shared, store_shared};
use cubecl::prelude::*;

/// Sums the tile's gradient over the queries, for a bias that is broadcast along queries. Thread `i` returns the sum
/// for the tile's `i`-th key. If the tile has no `i`-th key, thread `i` returns 0. The order of the additions is fixed:
/// first over the rows of each warp, then over the warps.
#[cube]
pub(super) fn sum_of_queries<AS: Size>(
    sums: Vector<f32, AS>,
    start: u32,
    #[comptime] tiles: BiasGradientTiles,
) -> f32 {
    // Wait until all warps have read the last chunk, since the sums overwrite that chunk in shared memory.
    sync_cube();
    let lane = UNIT_POS % 32u32;
    let warp = UNIT_POS / 32u32;
    let row_bytes = comptime!(4 * tiles.columns as u32);
    #[unroll]
    for block in 0..comptime!(tiles.columns / 8) {
        #[unroll]
        for second in 0..2usize {
            let mut sum = f32::new(0.0);
            #[unroll]
            for fragment in 0..tiles.fragments {
                let register = comptime!(fragment * tiles.vectors()[0] + 4 * block + second);
                sum += sums.extract(register) + sums.extract(comptime!(register + 2));
            }
            sum += plane_shuffle_xor(sum, 4u32);
            sum += plane_shuffle_xor(sum, 8u32);
            sum += plane_shuffle_xor(sum, 16u32);
            if lane < 4u32 {
                let column = lane * 2u32 + comptime!((8 * block + second) as u32);
                store_shared(
                    start + warp * row_bytes + column * 4u32,
                    u32::reinterpret(sum),
                );
            }
        }
    }
    sync_cube();
    let mut sum = f32::new(0.0);
    if UNIT_POS < comptime!(tiles.columns as u32) {
        #[unroll]
        for warp in 0..tiles.warps {
            sum += f32::reinterpret(load_shared(
                start + comptime!(warp as u32) * row_bytes + UNIT_POS * 4u32,
            ));
        }
    }
    sum
}

/// Writes one of the thread's two rows of the fragment `sums` to global memory. If `second` is 0, the function writes
/// the first row, else the second row. `row` is the index of the gradient element at which the written row starts. The
/// function does not write elements for keys that do not exist.
#[cube]
pub(super) fn write_row_of_keys<G: Float, NG: Size, NS: Size>(
    sums: Vector<f32, NS>,
    gradient: &mut Tensor<Vector<G, NG>>,
    row: usize,
    first_key: i32,
    kv_len: i32,
    #[comptime] second: usize,
    #[comptime] columns: usize,
) {
    let vector = gradient.vector_size();
    #[unroll]
    for block in 0..comptime!(columns / 8) {
        let key = first_key + comptime!(8 * block as i32) + (UNIT_POS % 4u32 * 2u32) as i32;
        let register = comptime!(4 * block + 2 * second);
        if comptime!(vector == 2) {
            if key < kv_len {
                let mut both = Vector::<f32, NG>::new(sums.extract(register));
                both.insert(1usize, sums.extract(comptime!(register + 1)));
                gradient[(row + key as usize) / 2] = rounded_vector::<G, NG>(both);
            }
        } else {
            #[unroll]
            for next in 0..2usize {
                let key = key + comptime!(next as i32);
                if key < kv_len {
                    let own = Vector::<f32, NG>::new(sums.extract(comptime!(register + next)));
                    gradient[row + key as usize] = rounded_vector::<G, NG>(own);
                }
            }
        }
    }
}
