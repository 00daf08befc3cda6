//! Helpers for the registers of a warp. One vector holds the registers of all 16-row fragments of a warp, one fragment
//! after another. Other helpers store and load one f32 per row in shared memory, so that warps can exchange these
//! values.

use cube_kit::nvidia::accumulator::Pair;
use cube_kit::nvidia::ptx::{load_shared, store_shared};
use cubecl::prelude::*;

/// Extracts the registers of fragment number `fragment` from the vector `all`, which holds all fragments of a warp.
#[cube]
pub(crate) fn fragment_of<A: Size, N: Size>(
    all: Vector<f32, A>,
    #[comptime] fragment: usize,
) -> Vector<f32, N> {
    let mut own = Vector::<f32, N>::zeroed();
    let count = own.vector_size();
    #[unroll]
    for i in 0..count {
        own.insert(i, all.extract(comptime!(fragment * count + i)));
    }
    own
}

/// Joins the registers of one or two fragments into one vector.
#[cube]
pub(crate) fn joined<P: Numeric, N: Size, A: Size>(
    first: Vector<P, N>,
    second: Vector<P, N>,
    #[comptime] fragments: usize,
) -> Vector<P, A> {
    let mut all = Vector::<P, A>::zeroed();
    let count = first.vector_size();
    #[unroll]
    for i in 0..count {
        all.insert(i, first.extract(i));
        if comptime!(fragments == 2) {
            all.insert(comptime!(count + i), second.extract(i));
        }
    }
    all
}

/// Finds the rows of a block that contribute to a warp's GEMM, whose right operand is the block. Returns one bit for
/// each block row that this lane multiplies. A bit is set if the matching column of the warp's left operand has a
/// nonzero element.
///
/// A block has `depth` rows. See [`add_product`](cube_kit::ampere::mma::add_product) for the order of the bits.
#[cube]
pub(crate) fn used_by_warp<A: Size>(
    left: Vector<u32, A>,
    #[comptime] depth: usize,
    #[comptime] fragments: usize,
) -> u32 {
    let mut used = 0u32;
    #[unroll]
    for pair in 0..comptime!(depth / 8) {
        let mut both = 0u32;
        #[unroll]
        for fragment in 0..fragments {
            let first = comptime!(fragment * depth / 4 + 2 * pair);
            both |= left.extract(first) | left.extract(comptime!(first + 1));
        }
        used |= select(
            both & 0xFFFFu32 != 0u32,
            comptime!(1u32 << (2 * pair)),
            0u32,
        ) | select(both >= 0x10000u32, comptime!(2u32 << (2 * pair)), 0u32);
    }
    used |= plane_shuffle_xor(used, 4u32);
    used |= plane_shuffle_xor(used, 8u32);
    used |= plane_shuffle_xor(used, 16u32);
    used
}

/// P or dS is the left operand of a GEMM, and lies in shared memory. This lane multiplies some columns of this operand.
/// Returns one bit for each of these columns. The bit is set if any of the `warps` warps that stored the operand has a
/// nonzero element in the column.
///
/// Each of the `warps` warps has stored 32 columns of some rows, and four words at `table`, one for each lane of a
/// quad. A set bit of these words marks a column in which the warp has a nonzero element. Consecutive warps form groups
/// of `groups` warps. The warps of a group have stored the same rows and different columns.
#[cube]
pub(crate) fn used_by_warps(
    table: u32,
    #[comptime] warps: usize,
    #[comptime] groups: usize,
) -> u32 {
    let start = table + UNIT_POS % 4u32 * 4u32;
    let mut used = 0u32;
    #[unroll]
    for warp in 0..warps {
        let own = load_shared(start + comptime!(16 * warp as u32));
        used |= own << comptime!((warp % groups * 8) as u32);
    }
    used
}

/// The distance in bytes between the two words of a thread in a table with one word per row. The thread's two rows are
/// 8 rows apart.
const TO_SECOND: u32 = 4 * 8;

/// Stores two f32 of a thread, one for each of its two rows, in a table with one word per row. One lane of each quad stores.
#[cube]
pub(crate) fn store_row_pair(own: Pair, table: u32, row: u32) {
    let lane_of_row = UNIT_POS % 4u32;
    if lane_of_row == 0u32 {
        let at = table + row * 4u32;
        store_shared(at, u32::reinterpret(own.first));
        store_shared(at + TO_SECOND, u32::reinterpret(own.second));
    }
}

/// Loads two f32, one for each of a thread's two rows, from a table with one word per row.
#[cube]
pub(crate) fn load_row_pair(table: u32, row: u32) -> Pair {
    let at = table + row * 4u32;
    Pair {
        first: f32::reinterpret(load_shared(at)),
        second: f32::reinterpret(load_shared(at + TO_SECOND)),
    }
}
