//! The registers of a warp's fragments, which follow each other in one vector.

use cube_kit::hopper::ptx::load_shared;
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
