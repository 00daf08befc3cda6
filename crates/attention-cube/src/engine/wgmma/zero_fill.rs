//! Rows of a block that nobody in the tile sees and that may hold anything: 0 · NaN must not reach a sum. What warps use of a block
//! meets in shared memory, a bit a row, in words of three turns.

use crate::math::visibility::Run;
use cube_kit::hopper::ROW_BYTES;
use cube_kit::hopper::ptx::{
    async_proxy_fence, load_shared, or_shared, store_shared, zero_fill_shared,
};
use cubecl::prelude::*;

/// Whether rows lie in the block from `first` on that nobody in the tile may see, by its `run` alone. Past the
/// `length` of the block's side the copy engine writes zeros.
#[cube]
pub(crate) fn has_out_of_range(
    run: &Run,
    length: i32,
    first: i32,
    #[comptime] block: usize,
) -> bool {
    first < run.first || (first + comptime!(block as i32) > run.end && run.end < length)
}

/// Which of the thread's columns are not zero, of P as the left operand of a product: a bit each.
#[cube]
pub(crate) fn used_columns<NP: Size>(p: Vector<u32, NP>, #[comptime] columns: usize) -> u32 {
    let mut used = 0u32;
    #[unroll]
    for pair in 0..columns / 8 {
        let both = p.extract(comptime!(2 * pair)) | p.extract(comptime!(2 * pair + 1));
        used |= select(
            both & 0xFFFFu32 != 0u32,
            comptime!(1u32 << (2 * pair)),
            0u32,
        ) | select(both >= 0x10000u32, comptime!(2u32 << (2 * pair)), 0u32);
    }
    used
}

/// Tells the cube which keys of the `count`-th visited block the thread's rows see, bits from `shift` on.
#[cube]
pub(crate) fn tell_used(used_at: u32, used: u32, shift: u32, count: u32) {
    let mut used = used << shift;
    used |= plane_shuffle_xor(used, 4u32);
    used |= plane_shuffle_xor(used, 8u32);
    used |= plane_shuffle_xor(used, 16u32);
    let lane = UNIT_POS % 32u32;
    if lane < 4u32 {
        or_shared(used_words(used_at, count) + 4u32 * lane, used);
    }
}

/// Forgets the used keys of the block after the next; these were last read before the cube met.
#[cube]
pub(crate) fn forget_used(used_at: u32, count: u32) {
    if UNIT_POS < 4u32 {
        store_shared(used_words(used_at, count + 2u32) + 4u32 * UNIT_POS, 0u32);
    }
}

/// Where a block's used keys are told: the words of the block's turn of three.
#[cube]
pub(crate) fn used_words(used_at: u32, turn: u32) -> u32 {
    used_at + turn % 3u32 * 16u32
}

/// Whether a block has a key that nobody uses.
#[cube]
pub(crate) fn has_masked(words: u32, #[comptime] block: usize) -> bool {
    let all = comptime!(match block / 4 {
        32 => u32::MAX,
        bits => (1u32 << bits) - 1,
    });
    let both = load_shared(words) & load_shared(words + 4u32);
    (both & load_shared(words + 8u32) & load_shared(words + 12u32)) != all
}

/// Whether a block has rows to be cleared: by what is used of the `count`-th visited block where it may have `masked`, else by the
/// tile's `run`.
#[cube]
pub(crate) fn has_unseen(
    run: &Run,
    length: i32,
    first: i32,
    used_at: u32,
    count: u32,
    #[comptime] block: usize,
    #[comptime] masked: bool,
) -> bool {
    let mut unseen = has_out_of_range(run, length, first, block);
    if comptime!(masked) {
        unseen = has_masked(used_words(used_at, count), block);
        forget_used(used_at, count);
    }
    unseen
}

/// Writes zeros over those of `count` rows, of the block from `first` on from its `first_row` on at `address`, that
/// nobody in the tile sees: 0 · NaN must not reach a sum. Shared by `units` threads, of which this is `unit`.
#[cube]
pub(crate) fn zero_fill_unseen(
    address: u32,
    run: &Run,
    first: i32,
    words: u32,
    unit: u32,
    #[comptime] first_row: usize,
    #[comptime] units: usize,
    #[comptime] count: usize,
    #[comptime] subtiles: usize,
    #[comptime] masked: bool,
) {
    let pieces = comptime!((subtiles * ROW_BYTES / 16) as u32);
    let mut index = unit;
    while index < comptime!((count * subtiles * ROW_BYTES / 16) as u32) {
        let row_here = index / pieces;
        let row = row_here + comptime!(first_row as u32);
        let position = first + row as i32;
        let mut seen = position >= run.first && position < run.end;
        if comptime!(masked) {
            let word = load_shared(words + row % 8u32 / 2u32 * 4u32);
            seen = (word >> (row / 8u32 * 2u32 + row % 2u32)) & 1u32 == 1u32;
        }
        if !seen {
            let piece = index % pieces;
            let subtile = piece / comptime!((ROW_BYTES / 16) as u32);
            let within = piece % comptime!((ROW_BYTES / 16) as u32);
            zero_fill_shared(
                address
                    + subtile * comptime!((count * ROW_BYTES) as u32)
                    + row_here * comptime!(ROW_BYTES as u32)
                    + within * 16u32,
            );
        }
        index += comptime!(units as u32);
    }
    async_proxy_fence();
}
