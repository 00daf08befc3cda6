//! Packs a bool mask for the tensor-core kernels into one bit per key, or per element of a block mask. Every pair of a
//! query tile and a key block also gets a summary.
//!
//! For each key block, a thread of an attention kernel loads the mask bits of a row as a few 32-bit words. Without the
//! packing, the thread would load one byte per score. The summary says how much of the key block is visible to the
//! query tile, in four grades from [`NOTHING`] to [`EVERYTHING`]. Kernels skip key blocks that are hidden from the
//! whole tile. In fully visible blocks, kernels do not test single keys.
//!
//! Budget: no shared memory, a few registers. Bound: memory; the mask is read once.

use crate::auxiliary::mask_bits::plan::WORDS_PER_PLANE;
use crate::math::visibility::Keys;
use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile};
use cubecl::prelude::*;

/// The number of planes (warps) per cube.
pub(crate) const PLANES: u32 = 8;

/// The grades of a summary: how much of a key block the mask leaves visible to a query tile.
///
/// - `NOTHING`: no query of the tile sees any key of the block.
/// - `SOME_KEYS`: some key is visible to a query, and some other key is visible to no query.
/// - `EVERY_KEY`: every key is visible to at least one query.
/// - `EVERYTHING`: every key is visible to every query.
pub(crate) const NOTHING: u32 = 0;
pub(crate) const SOME_KEYS: u32 = 1;
pub(crate) const EVERY_KEY: u32 = 2;
pub(crate) const EVERYTHING: u32 = 3;

/// The offsets and strides of the packed rows and of the block summaries, which share one buffer of 32-bit words. The
/// first three fields are the strides of the packed rows along sequences, heads and rows, in words. A broadcast
/// dimension has stride 0.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct MaskOffsets {
    pub batch: u32,
    pub head: u32,
    pub row: u32,
    /// The offset of the first block summary. The next three fields are the strides of the summaries along sequences, heads
    /// and tiles.
    pub blocks: u32,
    pub block_batch: u32,
    pub block_head: u32,
    pub block_tile: u32,
}

/// Packs the mask `[batch, heads, rows, kv_len]` into bits. A plane (warp) packs one piece of [`WORDS_PER_PLANE`]
/// words, and a row has `pieces` pieces. The whole mask has `count` pieces.
///
/// Each block of keys starts at a new word. Bits past the last key are 0.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn pack_mask_pdl<M: Numeric>(
    mask: &Tensor<M>,
    bits: &mut Tensor<u32>,
    heads: u32,
    rows: u32,
    kv_len: u32,
    pieces: u32,
    count: u32,
    #[comptime] block_keys: u32,
    #[comptime] pdl: bool,
    #[define(M)] _element: ElemType,
) {
    launch_dependents_and_wait(pdl);
    mark_volatile(mask, pdl);
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

/// Returns the index of the plane (of 32 units) within the whole launch. The function does not derive this index from
/// the index of the unit within the launch, because the unit's index may exceed a u32.
#[cube]
fn plane_of_launch() -> u32 {
    CUBE_POS as u32 * PLANES + UNIT_POS / 32u32
}

/// Computes the summaries of `count` pairs of a query tile (`tile_rows` queries) and a key block (`block_keys` keys).
///
/// A head has `tiles` tiles, `blocks` key blocks and `rows` queries. A packed row has `words` words. The summaries start at
/// word `start` of `bits`.
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

/// The pairs of a tile and a block whose summaries [`sum_up_block_mask`] computes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct SummaryGrid {
    /// The offset of the first summary, in words.
    pub start: u32,
    /// The number of rows of mask elements per head. A row takes `words` words.
    pub rows: u32,
    pub words: u32,
    /// The number of columns that the mask covers.
    pub columns: u32,
    /// The number of tiles per head, of blocks per tile, and of pairs of a tile and a block.
    pub tiles: u32,
    pub blocks: u32,
    pub count: u32,
    /// The number of rows of a tile, and the number of columns of a block.
    pub tile_rows: u32,
    pub block_columns: u32,
}

/// Computes the summaries of a packed block mask. An element of the mask covers `row_size` rows and `column_size`
/// columns.
///
/// The summaries of a head are for tiles that start at this head. A tile has rows of `tile_heads` heads, all from one
/// GQA group of `group` heads.
#[cube(launch_unchecked)]
pub(crate) fn sum_up_block_mask(
    bits: &mut Tensor<u32>,
    grid: SummaryGrid,
    tile_heads: u32,
    group: u32,
    row_size: u32,
    column_size: u32,
) {
    let index = plane_of_launch();
    if index < grid.count {
        let block = index % grid.blocks;
        let tile = index / grid.blocks % grid.tiles;
        let first_head = index / grid.blocks / grid.tiles;
        let end_head = min(first_head + tile_heads, (first_head / group + 1u32) * group);
        let first_row = min(tile * grid.tile_rows / row_size, grid.rows - 1u32);
        let last_row = min(
            ((tile + 1u32) * grid.tile_rows - 1u32) / row_size,
            grid.rows - 1u32,
        );
        let first_column = block * grid.block_columns;
        let end_column = min(first_column + grid.block_columns, grid.columns);
        let elements = Keys {
            first: (first_column / column_size) as i32,
            end: ((end_column - 1u32) / column_size + 1u32) as i32,
        };
        let lane = UNIT_POS % 32u32;
        let mut any = false;
        let mut every_column = true;
        let mut all = true;
        let mut word = elements.first / 32i32;
        while word * 32i32 < elements.end {
            let inside = bits_of_run(elements, word * 32i32);
            let mut seen = 0u32;
            let mut head = first_head;
            while head < end_head {
                let mut row = first_row + lane;
                while row <= last_row {
                    let at = (head * grid.rows + row) as usize * grid.words as usize;
                    let own = bits[at + word as usize] & inside;
                    seen |= own;
                    all = all && own == inside;
                    row += 32u32;
                }
                head += 1u32;
            }
            #[unroll]
            for step in 0..5u32 {
                seen |= plane_shuffle_xor(seen, comptime!(1u32 << step));
            }
            any = any || seen != 0u32;
            every_column = every_column && seen == inside;
            word += 1i32;
        }
        let all = plane_all(all);
        if lane == 0u32 {
            let some = select(every_column, EVERY_KEY, SOME_KEYS);
            let state = select(all, EVERYTHING, some);
            bits[(grid.start + index) as usize] = select(any, state, NOTHING);
        }
    }
}

/// Returns the mask's summary for tile `tile` of query head `head` and key block `block`.
#[cube]
pub(crate) fn summary_of_block(
    mask: &ComptimeOption<OwnedTensor<u32>>,
    offsets: &MaskOffsets,
    batch: u32,
    head: u32,
    tile: u32,
    block: u32,
) -> u32 {
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => {
            let at = offsets.blocks
                + batch * offsets.block_batch
                + head * offsets.block_head
                + tile * offsets.block_tile
                + block;
            mask[at as usize]
        }
        ComptimeOption::None => EVERYTHING.runtime(),
    }
}

/// Returns the 32-bit word with index `word` in the packed mask row of `query`. The index `query` must be below the
/// number of queries.
#[cube]
pub(crate) fn word_of(
    mask: &ComptimeOption<OwnedTensor<u32>>,
    offsets: &MaskOffsets,
    batch: u32,
    head: u32,
    query: u32,
    word: u32,
) -> u32 {
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => {
            let row = batch as usize * offsets.batch as usize
                + head as usize * offsets.head as usize
                + query as usize * offsets.row as usize;
            mask[row + word as usize]
        }
        ComptimeOption::None => 0u32.runtime(),
    }
}

/// Returns a word with one bit for each of the 32 keys `key` to `key + 31`. The bit of a key is set if the key lies in
/// the range `run`.
#[cube]
pub(crate) fn bits_of_run(run: Keys, key: i32) -> u32 {
    bits_below(run.end - key) & !bits_below(run.first - key)
}

/// Returns a word whose first `count` bits are set.
#[cube]
fn bits_below(count: i32) -> u32 {
    let count = u64::cast_from(min(max(count, 0i32), 32i32));
    u32::cast_from((1u64 << count) - 1u64)
}
