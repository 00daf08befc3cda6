//! Brings lengths and segments into one buffer of i32, and bounds the segments of every block.
//!
//! Budget: no shared memory, a few registers; bound by memory, of which there is little: an id a token.
//! One unit copies one integer, or reads one block's ids.

use cubecl::prelude::*;

/// Copies integers of any width into the packed ones, from `start` on, row by row of `source`; bounded by 0 and `largest`
/// where this `clamps`, which takes an `I` that holds `largest`.
#[cube(launch_unchecked)]
pub(crate) fn pack_integers<I: Int>(
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

/// The smallest and the largest id of every block of `block` tokens, from the packed ids at `ids` to
/// the packed bounds at `bounds`.
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
        for token in start + 1u32..end {
            let id = packed[(row + token) as usize];
            smallest = min(smallest, id);
            largest = max(largest, id);
        }
        packed[(bounds + 2u32 * index) as usize] = smallest;
        packed[(bounds + 2u32 * index + 1u32) as usize] = largest;
    }
}
