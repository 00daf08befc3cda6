//! The registers of a warp's fragments, which follow each other in one vector, and what warps tell each other of their rows.

use cube_kit::hopper::accumulator::Pair;
use cube_kit::hopper::ptx::{load_shared, store_shared};
use cubecl::prelude::*;

/// The registers of one of the fragments.
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

/// The registers of one or two fragments as one.
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

/// The rows of a block, `depth` of them, that some row of the warp uses of the left operand, of those that this lane multiplies by:
/// see [`add_product`](cube_kit::ampere::product::add_product).
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

/// The columns of a block that some of the `warps` from the first at `table` on use, which all told of theirs in four words each, of
/// those that this lane multiplies by. `groups` warps with the same rows have 32 columns each.
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

/// Bytes from a thread's row to its second, 8 below, where rows have a word each.
const TO_SECOND: u32 = 4 * 8;

/// Writes two rows' numbers to a table of words.
#[cube]
pub(crate) fn tell_rows(own: Pair, table: u32, row: u32) {
    let lane_of_row = UNIT_POS % 4u32;
    if lane_of_row == 0u32 {
        let at = table + row * 4u32;
        store_shared(at, u32::reinterpret(own.first));
        store_shared(at + TO_SECOND, u32::reinterpret(own.second));
    }
}

/// Two rows' numbers of a table of words.
#[cube]
pub(crate) fn told_rows(table: u32, row: u32) -> Pair {
    let at = table + row * 4u32;
    Pair {
        first: f32::reinterpret(load_shared(at)),
        second: f32::reinterpret(load_shared(at + TO_SECOND)),
    }
}
