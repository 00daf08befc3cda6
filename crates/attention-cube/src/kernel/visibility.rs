//! What a query sees: causal mask, window, lengths, segments, mask. One definition for every engine.
//!
//! Causal mask, window and length leave each query one run of keys, `first_key(i)..end_key(i)`, whose
//! ends grow with `i`. So the keys of a tile of queries are one run too, the blocks outside of it are
//! never visited, and a block inside every query's run needs no test.

use cubecl::prelude::*;

/// Stands for "no limit" on a side of the window. Positions are below it, and sums of the two fit in i32.
pub(crate) const OPEN: i32 = 1 << 30;

/// Lengths and window of the problem.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Extent {
    pub q_len: i32,
    pub kv_len: i32,
    /// Keys to the left of a query's own position that it sees, or [`OPEN`].
    pub left: i32,
    /// Keys to the right likewise; 0 where attention is causal.
    pub right: i32,
    /// 1 if the last query's position is the last key's, 0 if the first's is the first's.
    pub bottom_right: i32,
    /// Where the segments' parts of the packed integers start: ids of queries, ids of keys, bounds of blocks.
    pub query_ids: u32,
    pub key_ids: u32,
    pub query_bounds: u32,
    pub key_bounds: u32,
}

/// Which structures hide keys beyond the window, known when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Structure {
    pub lengths: bool,
    pub segments: bool,
    pub mask: bool,
}

impl Structure {
    /// Whether a key between two visible ones can be hidden.
    pub const fn is_irregular(&self) -> bool {
        self.segments || self.mask
    }
}

/// One sequence of the batch.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Sight {
    pub q_len: i32,
    /// Keys that exist.
    pub length: i32,
    /// Position of query 0.
    pub offset: i32,
    pub left: i32,
    pub right: i32,
}

#[cube]
pub(crate) fn sight(
    extent: &Extent,
    integers: &ComptimeOption<&Tensor<i32>>,
    batch: u32,
    #[comptime] structure: Structure,
) -> Sight {
    let mut length = extent.kv_len;
    if comptime!(structure.lengths) {
        let own = integer(integers, batch);
        length = min(max(own, 0i32), length);
    }
    let offset = (length - extent.q_len) * extent.bottom_right;
    Sight {
        q_len: extent.q_len,
        length,
        offset,
        left: extent.left,
        right: extent.right,
    }
}

/// One of the packed integers.
#[cube]
pub(crate) fn integer(integers: &ComptimeOption<&Tensor<i32>>, index: u32) -> i32 {
    #[comptime]
    match integers {
        ComptimeOption::Some(integers) => integers[index as usize],
        ComptimeOption::None => 0i32,
    }
}

/// The first key that query `i` sees.
#[cube]
pub(crate) fn first_key(sight: &Sight, i: i32) -> i32 {
    max(i + sight.offset - sight.left, 0i32)
}

/// One past the last key that query `i` sees; not above `first_key` if it sees none.
#[cube]
pub(crate) fn end_key(sight: &Sight, i: i32) -> i32 {
    max(
        min(i + sight.offset + sight.right + 1i32, sight.length),
        0i32,
    )
}

/// The first query that sees key `j`.
#[cube]
pub(crate) fn first_query(sight: &Sight, j: i32) -> i32 {
    max(j - sight.offset - sight.right, 0i32)
}

/// One past the last query that sees key `j`.
#[cube]
pub(crate) fn end_query(sight: &Sight, j: i32) -> i32 {
    max(min(j - sight.offset + sight.left + 1i32, sight.q_len), 0i32)
}

/// Whether a block of queries and a block of keys, by number, can share a segment: their ids' ranges overlap.
#[cube]
pub(crate) fn segments_meet(
    extent: &Extent,
    integers: &ComptimeOption<&Tensor<i32>>,
    query_block: u32,
    key_block: u32,
) -> bool {
    let query_at = extent.query_bounds + 2u32 * query_block;
    let key_at = extent.key_bounds + 2u32 * key_block;
    integer(integers, query_at) <= integer(integers, key_at + 1u32)
        && integer(integers, key_at) <= integer(integers, query_at + 1u32)
}

/// Whether query `i` sees key `j`, both of them existing: window, length and segments.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(crate) fn sees(
    sight: &Sight,
    extent: &Extent,
    integers: &ComptimeOption<&Tensor<i32>>,
    batch: u32,
    i: i32,
    j: i32,
    #[comptime] structure: Structure,
) -> bool {
    let mut visible = j >= first_key(sight, i) && j < end_key(sight, i);
    if comptime!(structure.segments) {
        if visible {
            let query_at = extent.query_ids + batch * extent.q_len as u32 + i as u32;
            let key_at = extent.key_ids + batch * extent.kv_len as u32 + j as u32;
            visible = integer(integers, query_at) == integer(integers, key_at);
        }
    }
    visible
}

/// Copies integers of any width into the packed ones, from `start` on, row by row of `source`.
#[cube(launch_unchecked)]
pub(crate) fn pack_integers<I: Int>(
    source: &Tensor<I>,
    packed: &mut Tensor<i32>,
    start: u32,
    columns: u32,
    count: u32,
    #[define(I)] _dtype: ElemType,
) {
    let index = ABSOLUTE_POS as u32;
    if index < count {
        let row = (index / columns) as usize;
        let column = (index % columns) as usize;
        let value = source[row * source.stride(0) + column * source.stride(1)];
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
