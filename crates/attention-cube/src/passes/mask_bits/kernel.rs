//! A bool mask as the Hopper kernels read it: a bit a key, and for every tile of queries and block of keys
//! whether it hides nothing, something or everything.
//!
//! A fragment's threads would read a byte for each of their scores; as bits a thread reads its row of a block
//! by a few words. Blocks that the mask hides from a whole tile are not visited, and those that it leaves
//! alone are not tested.
//!
//! Budget: no shared memory, a few registers; bound by reading the mask once.

use crate::math::visibility::Keys;
use crate::passes::mask_bits::plan::WORDS_PER_PLANE;
use cube_kit::overlap::{take_turn, was_written};
use cubecl::prelude::*;

/// Planes of a cube.
pub(crate) const PLANES: u32 = 8;

/// What a tile sees of a block: nothing; some keys not at all; every key by some query; everything.
pub(crate) const NOTHING: u32 = 0;
pub(crate) const SOME_KEYS: u32 = 1;
pub(crate) const EVERY_KEY: u32 = 2;
pub(crate) const EVERYTHING: u32 = 3;

/// Where rows of bits, and what tiles see of blocks, lie in one buffer of words. A step is 0 along what the
/// mask is broadcast.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct MaskPlaces {
    pub batch: u32,
    pub head: u32,
    pub row: u32,
    /// Where the blocks start, and their steps.
    pub blocks: u32,
    pub block_batch: u32,
    pub block_head: u32,
    pub block_tile: u32,
}

/// Packs `count` pieces of [`WORDS_PER_PLANE`] words, `pieces` of them a row of the mask
/// `[batch, heads, rows, kv_len]`. Each block of keys has words of its own. Past the last key bits are 0.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn pack_mask_overlapped<M: Numeric>(
    mask: &Tensor<M>,
    bits: &mut Tensor<u32>,
    heads: u32,
    rows: u32,
    kv_len: u32,
    pieces: u32,
    count: u32,
    #[comptime] block_keys: u32,
    #[comptime] overlaps: bool,
    #[define(M)] _element: ElemType,
) {
    take_turn(overlaps);
    was_written(mask, overlaps);
    let index = plane_of_launch();
    let lane = UNIT_POS % 32u32;
    let block_words = comptime!(block_keys.div_ceil(32));
    if index < count {
        let piece = index % pieces;
        let row = index / pieces;
        let start = (row / rows / heads) as usize * mask.stride(0)
            + (row / rows % heads) as usize * mask.stride(1)
            + (row % rows) as usize * mask.stride(2);
        let mut own = 0u32;
        #[unroll]
        for turn in 0..WORDS_PER_PLANE {
            let word = piece * comptime!(WORDS_PER_PLANE as u32) + comptime!(turn as u32);
            let in_block = word % block_words * 32u32 + lane;
            let key = word / block_words * block_keys + in_block;
            let mut visible = false;
            if in_block < block_keys && key < kv_len {
                visible = mask[start + key as usize * mask.stride(3)] != M::from_int(0);
            }
            let packed = plane_ballot(visible).extract(0usize);
            own = select(lane == comptime!(turn as u32), packed, own);
        }
        if lane < comptime!(WORDS_PER_PLANE as u32) {
            bits[(index * comptime!(WORDS_PER_PLANE as u32) + lane) as usize] = own;
        }
    }
}

/// The plane's number: 32 bits count planes, but not 32 times as many units.
#[cube]
fn plane_of_launch() -> u32 {
    CUBE_POS as u32 * PLANES + UNIT_POS / 32u32
}

/// Tells for `count` pairs of a tile of `tile_rows` queries and a block of `block_keys` keys what the one sees
/// of the other. `tiles` and `blocks` of them are in a head, whose `rows` rows have `words` words.
#[cube(launch_unchecked)]
pub(crate) fn sum_up_mask(
    bits: &mut Tensor<u32>,
    start: u32,
    rows: u32,
    kv_len: u32,
    words: u32,
    tiles: u32,
    blocks: u32,
    count: u32,
    #[comptime] tile_rows: u32,
    #[comptime] block_keys: u32,
) {
    let index = plane_of_launch();
    if index < count {
        let block = index % blocks;
        let first_row = index / blocks % tiles * tile_rows;
        let end_row = min(first_row + tile_rows, rows);
        let head = index / blocks / tiles * rows;
        let keys = min(block_keys, kv_len - block * block_keys) as i32;
        let lane = UNIT_POS % 32u32;
        let mut any = false;
        let mut every_key = true;
        let mut all = true;
        #[unroll]
        for word in 0..comptime!(block_keys.div_ceil(32)) {
            let at = block * comptime!(block_keys.div_ceil(32)) + word;
            let inside = bits_below(keys - comptime!(32 * word as i32));
            let mut seen = 0u32;
            let mut row = first_row + lane;
            while row < end_row {
                let own = bits[(head + row) as usize * words as usize + at as usize];
                seen |= own;
                all = all && own == inside;
                row += 32u32;
            }
            #[unroll]
            for step in 0..5u32 {
                seen |= plane_shuffle_xor(seen, comptime!(1u32 << step));
            }
            any = any || seen != 0u32;
            every_key = every_key && seen == inside;
        }
        let all = plane_all(all);
        if lane == 0u32 {
            let some = select(every_key, EVERY_KEY, SOME_KEYS);
            let state = select(all, EVERYTHING, some);
            bits[(start + index) as usize] = select(any, state, NOTHING);
        }
    }
}

/// A tile's view of block `block` of keys; `tile` counts the tiles of query head `head`.
#[cube]
pub(crate) fn sight_of_block(
    mask: &ComptimeOption<&Tensor<u32>>,
    places: &MaskPlaces,
    batch: u32,
    head: u32,
    tile: u32,
    block: u32,
) -> u32 {
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => {
            let at = places.blocks
                + batch * places.block_batch
                + head * places.block_head
                + tile * places.block_tile
                + block;
            mask[at as usize]
        }
        ComptimeOption::None => EVERYTHING.runtime(),
    }
}

/// The `word`-th 32 bits of a query that exists, counted through its blocks.
#[cube]
pub(crate) fn word_of(
    mask: &ComptimeOption<&Tensor<u32>>,
    places: &MaskPlaces,
    batch: u32,
    head: u32,
    query: u32,
    word: u32,
) -> u32 {
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => {
            let row = batch as usize * places.batch as usize
                + head as usize * places.head as usize
                + query as usize * places.row as usize;
            mask[row + word as usize]
        }
        ComptimeOption::None => 0u32.runtime(),
    }
}

/// The bits of those of 32 keys from `key` on that are in a run.
#[cube]
pub(crate) fn bits_of_run(run: Keys, key: i32) -> u32 {
    bits_below(run.end - key) & !bits_below(run.first - key)
}

/// The first `count` bits.
#[cube]
fn bits_below(count: i32) -> u32 {
    let count = u64::cast_from(min(max(count, 0i32), 32i32));
    u32::cast_from((1u64 << count) - 1u64)
}
