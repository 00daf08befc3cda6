//! Brings lengths and segments into one buffer of i32, bounds the segments of every block, and tells every tile which blocks
//! may share one with it, so that nobody looks for these where many documents are packed.
//!
//! Budget: no shared memory, a few registers; bound by memory, of which there is little: an id a token.
//! One unit copies one integer, or reads one block's ids; one cube looks for a tile's blocks.

use crate::math::visibility::BLOCK_BOUNDS;
use cubecl::prelude::*;

/// Copies integers of any width into the packed ones, from `start` on, row by row of `source`; bounded by 0 and `largest`
/// where this `clamps`, which takes an `I` that holds `largest`.
#[cube(launch_unchecked)]
pub(crate) fn pack_lengths_and_ids<I: Int>(
    source: &Tensor<I>,
    packed: &mut Tensor<i32>,
    start: u32,
    columns: u32,
    count: u32,
    largest: i32,
    #[comptime] clamps: bool,
    #[define(I)] _dtype: ElemType,
) {
    let index = ABSOLUTE_POS as u32;
    if index < count {
        let row = (index / columns) as usize;
        let column = (index % columns) as usize;
        let mut value = source[row * source.stride(0) + column * source.stride(1)];
        if comptime!(clamps) {
            value = min(max(value, I::from_int(0)), I::cast_from(largest));
        }
        packed[(start + index) as usize] = i32::cast_from(value);
    }
}

/// The smallest and the largest id of every block of `block` tokens, and a bit for each, from the packed ids at `ids`
/// to the blocks' integers at `bounds`.
#[cube(launch_unchecked)]
pub(crate) fn bound_segments(
    packed: &mut Tensor<i32>,
    ids: u32,
    bounds: u32,
    length: u32,
    blocks: u32,
    count: u32,
    #[comptime] block: u32,
) {
    let index = ABSOLUTE_POS as u32;
    if index < count {
        let start = (index % blocks) * block;
        let end = min(start + block, length);
        let row = ids + (index / blocks) * length;
        let mut smallest = packed[(row + start) as usize];
        let mut largest = smallest;
        let mut bits = 0u32;
        for token in start..end {
            let id = packed[(row + token) as usize];
            smallest = min(smallest, id);
            largest = max(largest, id);
            bits |= 1u32 << (u32::reinterpret(id) % 32u32);
        }
        let at = (bounds + comptime!(BLOCK_BOUNDS as u32) * index) as usize;
        packed[at] = smallest;
        packed[at + 1] = largest;
        packed[at + 2] = i32::reinterpret(bits);
    }
}

/// For the `count` blocks whose integers start at `bounds`, a cube a block: the first block of the other side, whose start at
/// `others`, that may share a document with it, and one past the last. The integer at `counter` becomes 0.
#[cube(launch_unchecked)]
pub(crate) fn span_segments(
    packed: &mut Tensor<i32>,
    bounds: u32,
    others: u32,
    blocks: u32,
    other_blocks: u32,
    count: u32,
    counter: u32,
    #[comptime] units: u32,
) {
    let index = CUBE_POS as u32;
    if index >= count {
        terminate!();
    }
    let size = comptime!(BLOCK_BOUNDS as u32);
    let at = (bounds + size * index) as usize;
    let smallest = packed[at];
    let largest = packed[at + 1];
    let bits = packed[at + 2];
    let start = others + size * (index / blocks) * other_blocks;
    let mut first = other_blocks as i32;
    let mut end = 0i32;
    let mut block = UNIT_POS;
    while block < other_blocks {
        let there = (start + size * block) as usize;
        let overlaps = smallest <= packed[there + 1] && packed[there] <= largest;
        if overlaps && bits & packed[there + 2] != 0i32 {
            first = min(first, block as i32);
            end = block as i32 + 1i32;
        }
        block += units;
    }
    let mut firsts = Shared::<[i32]>::new_slice(comptime!(units as usize));
    let mut ends = Shared::<[i32]>::new_slice(comptime!(units as usize));
    firsts[UNIT_POS as usize] = first;
    ends[UNIT_POS as usize] = end;
    sync_cube();
    if UNIT_POS == 0u32 {
        for unit in 1..comptime!(units as usize) {
            first = min(first, firsts[unit]);
            end = max(end, ends[unit]);
        }
        packed[at + 3] = first;
        packed[at + 4] = end;
        if index == 0u32 {
            packed[counter as usize] = 0i32;
        }
    }
}
