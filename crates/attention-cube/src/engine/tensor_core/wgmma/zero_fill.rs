//! Writes zeros over those rows of a block of V, K, Q or dO that no row of the tile sees. These hidden rows may hold
//! NaN, and `0 · NaN` is NaN.
//!
//! The *used bits* in shared memory have one bit for each row of a block. Each warp computes scores for some rows of
//! the tile. The warp sets the bit of a block row if one of these tile rows sees the block row. The bits of a block lie
//! in four 32-bit *used words*. There are three sets of four words. Consecutive blocks use the three sets in turn.

use crate::math::visibility::Run;
use cube_kit::hopper::ptx::async_proxy_fence;
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::ptx::{load_shared, or_shared, store_shared, zero_fill_shared};
use cubecl::prelude::*;

/// True if the block that starts at row `first` has rows outside of the tile's visible range `run`. Rows at or past
/// `length` do not count, because TMA has already written zeros there.
#[cube]
pub(crate) fn has_out_of_range(
    run: &Run,
    length: i32,
    first: i32,
    #[comptime] block: usize,
) -> bool {
    first < run.first || (first + comptime!(block as i32) > run.end && run.end < length)
}

/// Returns a bit mask of columns. A thread holds elements of some columns of P, and each of these columns has one bit.
/// The bit is 1 if at least one of the thread's elements in the column is not 0.
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

/// Sets *used bits* of the `count`-th block in shared memory. A used bit tells whether some row of the tile sees a
/// certain row of the block. (A row of the block is a column of S.) `used` holds the bits that this thread contributes,
/// and the function combines the bits of the warp's lanes. Bit 0 of `used` becomes bit `shift` of the stored word.
#[cube]
pub(crate) fn signal_used_keys(used_at: u32, used: u32, shift: u32, count: u32) {
    let mut used = used << shift;
    used |= plane_shuffle_xor(used, 4u32);
    used |= plane_shuffle_xor(used, 8u32);
    used |= plane_shuffle_xor(used, 16u32);
    let lane = UNIT_POS % 32u32;
    if lane < 4u32 {
        or_shared(used_words(used_at, count) + 4u32 * lane, used);
    }
}

/// Clears the *used words* of block `count + 2`. Each bit of these words tells whether the tile sees a certain row of
/// the block. Block `count − 1` used the same words. Before this call, all warps must have read these words for block
/// `count − 1` and then passed a barrier.
#[cube]
pub(crate) fn forget_used(used_at: u32, count: u32) {
    if UNIT_POS < 4u32 {
        store_shared(used_words(used_at, count + 2u32) + 4u32 * UNIT_POS, 0u32);
    }
}

/// Returns the address of the *used words* of the `turn`-th block. Each bit of these words tells whether the tile sees
/// a certain row of the block. There are three sets of words, and consecutive blocks use the three sets in turn.
#[cube]
pub(crate) fn used_words(used_at: u32, turn: u32) -> u32 {
    used_at + turn % 3u32 * 16u32
}

/// True if the block has a row (a column of S) that no row of the tile sees. The bits at `words` in shared memory tell
/// which block rows the tile sees.
#[cube]
pub(crate) fn has_masked(words: u32, #[comptime] block: usize) -> bool {
    let all = comptime!(match block / 4 {
        32 => u32::MAX,
        bits => (1u32 << bits) - 1,
    });
    let both = load_shared(words) & load_shared(words + 4u32);
    (both & load_shared(words + 8u32) & load_shared(words + 12u32)) != all
}

/// True if the block has rows that no row of the tile sees. If `masked`, the function reads the *used words* of the
/// `count`-th block. Each set bit of these words marks a block row that the tile sees. With `masked`, the function also
/// clears the used words of block `count + 2`. Without `masked`, the function compares the block with the tile's
/// visible range `run`.
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

/// Writes zeros over those rows of a block that no row of the tile sees. These hidden rows may hold NaN, and `0 · NaN`
/// is NaN.
///
/// The block starts at position `first` of the sequence. The call covers only `count` rows of the block, from its row
/// `first_row` on. These rows lie at `address` in shared memory. A group of `units` threads shares the work, and `unit`
/// is this thread's index in the group.
///
/// If `masked`, the bits at `words` in shared memory tell which block rows the tile sees. Otherwise the tile's visible
/// range `run` tells which block rows the tile sees.
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
