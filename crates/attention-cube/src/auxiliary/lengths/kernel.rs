//! Packs sequence lengths, segment ids and the queries' key intervals into one i32 buffer. Further kernels in this file
//! compute the bounds of every block of tokens, such as the block's smallest and largest segment id. These kernels also
//! compute the block range of every tile. A tile is a block of queries if the attention kernel streams keys, and a
//! block of keys if it streams queries.
//!
//! The block range of a query tile spans all key blocks that may be visible to the tile under segments and intervals.
//! The block range of a key tile spans all query blocks that may see a key of the tile. With block ranges, attention
//! kernels need not search for visible blocks.
//!
//! Schedule: one unit copies one i32. One cube computes the bounds of one block, or the block range of one tile.
//! Budget: a few registers. Copies use no shared memory. Bounds and block ranges use at most eight i32 values of shared
//! memory per unit. Bound: memory, with one to five values per token.

use crate::math::side::Side;
use crate::math::visibility::{BLOCK_BOUNDS, INTERVAL_BOUNDS, Structure};
use cubecl::prelude::*;

/// Copies the lengths or segment ids in `source` to `packed`, starting at index `start`. In `packed`, consecutive
/// integers are `record` elements apart.
///
/// If `clamps`, the kernel clamps each integer to `0..=largest`. In this case, `largest` must fit the type `I`.
#[cube(launch_unchecked)]
pub(crate) fn pack_lengths_and_ids<I: Int>(
    source: &Tensor<I>,
    packed: &mut Tensor<i32>,
    start: u32,
    columns: u32,
    count: u32,
    largest: i32,
    #[comptime] clamps: bool,
    #[comptime] record: u32,
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
        let mut at = start + index;
        if comptime!(record > 1) {
            at = start + record * index;
        }
        packed[at as usize] = i32::cast_from(value);
    }
}

/// Copies the key intervals of each query to the query's record in `packed`, and computes bounds of each query block
/// from the intervals of the block's queries. Either every query has one interval, or every query has two intervals.
///
/// `source` is `[batch, q_len, 2 · intervals]`: the first key and the end of each interval. The kernel clamps both ends
/// of an interval to `0..=kv_len`. Integers of a type narrower than i32 are converted before the clamp, because a
/// narrower type may not represent `kv_len`. Integers of wider types are clamped first, because their values may exceed
/// i32.
///
/// For the first intervals of the block's queries, the kernel writes two ranges of key blocks. The first range covers
/// each key block that has a key in at least one of these intervals. The second range covers each key block that lies
/// entirely in all of these intervals. If every query has two intervals, the kernel writes two more ranges in the same
/// way for the second intervals. A query block has `block` queries, and a key block has `keys` keys. See
/// [`INTERVAL_BOUNDS`].
///
/// The records of the queries start at index `records` of `packed`, and the bounds of the query blocks at index
/// `bounds`. One cube handles one query block.
///
/// If `spans`, the kernel also does the work of [`span_blocks`] for query blocks. The problem must then have no
/// segments, because this kernel does not read segment ids.
#[cube(launch_unchecked)]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(crate) fn bound_intervals<I: Int>(
    source: &Tensor<I>,
    packed: &mut Tensor<i32>,
    records: u32,
    bounds: u32,
    length: u32,
    blocks: u32,
    count: u32,
    counter: u32,
    kv_len: i32,
    #[comptime] block: u32,
    #[comptime] keys: i32,
    #[comptime] spans: bool,
    #[comptime] is_narrow: bool,
    #[comptime] structure: Structure,
    #[comptime] units: u32,
    #[define(I)] _dtype: ElemType,
) {
    let index = CUBE_POS as u32;
    if index >= count {
        terminate!();
    }
    let start = (index % blocks) * block;
    let end = min(start + block, length);
    let batch = index / blocks;
    let row = batch * length;
    let record = comptime!(structure.query_record() as u32);
    let at = bounds + comptime!(structure.query_block_bounds() as u32) * index;
    let mut span_first = kv_len;
    let mut span_end = 0i32;
    #[unroll]
    for interval in 0..structure.intervals {
        let own = comptime!((structure.segments as usize + 2 * interval) as u32);
        let mut smallest_first = kv_len;
        let mut largest_first = 0i32;
        let mut smallest_end = kv_len;
        let mut largest_end = 0i32;
        let mut query = start + UNIT_POS;
        while query < end {
            let from = batch as usize * source.stride(0)
                + query as usize * source.stride(1)
                + comptime!(2 * interval) * source.stride(2);
            let first = clamped_key::<I>(source[from], kv_len, is_narrow);
            let last = clamped_key::<I>(source[from + source.stride(2)], kv_len, is_narrow);
            let at = (records + record * (row + query) + own) as usize;
            packed[at] = first;
            packed[at + 1] = last;
            largest_first = max(largest_first, first);
            smallest_end = min(smallest_end, last);
            // Leave a query with an empty interval out of the range of visible key blocks, because the query sees no
            // key through this interval.
            if first < last {
                smallest_first = min(smallest_first, first);
                largest_end = max(largest_end, last);
            }
            query += units;
        }
        let smallest_first = reduced(smallest_first, Reduction::Smallest, units);
        let largest_first = -reduced(-largest_first, Reduction::Smallest, units);
        let smallest_end = reduced(smallest_end, Reduction::Smallest, units);
        let largest_end = -reduced(-largest_end, Reduction::Smallest, units);
        if UNIT_POS == 0u32 {
            let first = smallest_first / keys;
            let end = (largest_end + keys - 1i32) / keys;
            span_first = min(span_first, first);
            span_end = max(span_end, end);
            let at = at + comptime!((BLOCK_BOUNDS + INTERVAL_BOUNDS * interval) as u32);
            let at = at as usize;
            packed[at] = first;
            packed[at + 1] = end;
            packed[at + 2] = (largest_first + keys - 1i32) / keys;
            // The last key block may have fewer than `keys` keys. If the intervals of all queries end at `kv_len`, this
            // key block counts as fully visible.
            packed[at + 3] = select(
                smallest_end == kv_len,
                (kv_len + keys - 1i32) / keys,
                smallest_end / keys,
            );
        }
    }
    if comptime!(spans) {
        if UNIT_POS == 0u32 {
            packed[(at + 3u32) as usize] = span_first;
            packed[(at + 4u32) as usize] = span_end;
            if index == 0u32 {
                packed[counter as usize] = 0i32;
            }
        }
    }
}

/// Converts the index of a key to i32, clamped to `0..=kv_len`.
#[cube]
fn clamped_key<I: Int>(key: I, kv_len: i32, #[comptime] is_narrow: bool) -> i32 {
    if comptime!(is_narrow) {
        min(max(i32::cast_from(key), 0i32), kv_len)
    } else {
        i32::cast_from(min(max(key, I::from_int(0)), I::cast_from(kv_len)))
    }
}

/// The operation that [`reduced`] applies to the values of all units.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reduction {
    Smallest,
    BitwiseOr,
    Sum,
}

/// Combines the values of all `units` units of the cube by `reduction`. Only unit 0 gets the result. All units must
/// call this function, and `units` must be a power of two.
#[cube]
fn reduced(value: i32, #[comptime] reduction: Reduction, #[comptime] units: u32) -> i32 {
    let mut values = Shared::<[i32]>::new_slice(comptime!(units as usize));
    let mut result = value;
    values[UNIT_POS as usize] = result;
    sync_cube();
    #[unroll]
    for step in 0..comptime!(units.ilog2()) {
        let half = comptime!(units >> (step + 1));
        if UNIT_POS < half {
            let other = values[(UNIT_POS + half) as usize];
            result = if comptime!(reduction == Reduction::Smallest) {
                min(result, other)
            } else if comptime!(reduction == Reduction::Sum) {
                result + other
            } else {
                result | other
            };
            values[UNIT_POS as usize] = result;
        }
        sync_cube();
    }
    result
}

/// Computes the bounds of every block of `block` tokens: the smallest segment id, the largest segment id, and a bit set of all
/// ids modulo 32. One cube handles one block.
///
/// The segment ids start at index `ids` of `packed`, `record` elements apart. The bounds start at index `bounds`, with
/// `block_bounds` values per block.
#[cube(launch_unchecked)]
pub(crate) fn bound_segments(
    packed: &mut Tensor<i32>,
    ids: u32,
    bounds: u32,
    length: u32,
    blocks: u32,
    count: u32,
    #[comptime] block: u32,
    #[comptime] record: u32,
    #[comptime] block_bounds: u32,
    #[comptime] units: u32,
) {
    let index = CUBE_POS as u32;
    if index >= count {
        terminate!();
    }
    let start = (index % blocks) * block;
    let end = min(start + block, length);
    let row = ids + (index / blocks) * length * record;
    let mut smallest = packed[(row + start * record) as usize];
    let mut largest = smallest;
    let mut bits = 0u32;
    let mut token = start + UNIT_POS;
    while token < end {
        let id = packed[(row + token * record) as usize];
        smallest = min(smallest, id);
        largest = max(largest, id);
        bits |= 1u32 << (u32::reinterpret(id) % 32u32);
        token += units;
    }
    let smallest = reduced(smallest, Reduction::Smallest, units);
    // Compute the largest id as the complement of the smallest complement, because the bitwise complement reverses the
    // order of all i32. The negation would also reverse the order, but the negation of the smallest i32 overflows.
    let largest = !reduced(!largest, Reduction::Smallest, units);
    let bits = reduced(i32::reinterpret(bits), Reduction::BitwiseOr, units);
    if UNIT_POS == 0u32 {
        let at = (bounds + block_bounds * index) as usize;
        packed[at] = smallest;
        packed[at + 1] = largest;
        packed[at + 2] = bits;
    }
}

/// Computes the block ranges of `count` blocks of `side` (queries or keys), with one cube per block. If `side` is
/// queries, the block range of a query block spans all key blocks that its queries may see. If `side` is keys, the
/// block range of a key block spans all query blocks that may see one of its keys. The range takes only segments and
/// key intervals into account.
///
/// In `packed`, the bounds of the blocks of `side` start at index `bounds`. The bounds of the blocks of the opposite
/// side start at index `others`. The block range of a block is stored in elements 3 and 4 of this block's bounds.
/// Element 3 is the index of the first block in the range, and element 4 is the index after the last. The kernel also
/// sets the counter at index `counter` to 0. Persistent attention cubes claim tiles by incrementing this counter.
#[cube(launch_unchecked)]
pub(crate) fn span_blocks(
    packed: &mut Tensor<i32>,
    bounds: u32,
    others: u32,
    blocks: u32,
    other_blocks: u32,
    count: u32,
    counter: u32,
    #[comptime] side: Side,
    #[comptime] structure: Structure,
    #[comptime] units: u32,
) {
    let index = CUBE_POS as u32;
    if index >= count {
        terminate!();
    }
    let size = comptime!(structure.bounds_of_side(side));
    let other_size = comptime!(structure.bounds_of_side(side.other()));
    let at = (bounds + size * index) as usize;
    let smallest = packed[at];
    let largest = packed[at + 1];
    let bits = packed[at + 2];
    let start = others + other_size * (index / blocks) * other_blocks;
    let mut first = other_blocks as i32;
    let mut end = 0i32;
    let mut block = UNIT_POS;
    while block < other_blocks {
        let there = (start + other_size * block) as usize;
        let mut meets = true.runtime();
        if comptime!(structure.segments) {
            let ranges_overlap = smallest <= packed[there + 1] && packed[there] <= largest;
            meets = ranges_overlap && bits & packed[there + 2] != 0i32;
        }
        if comptime!(structure.intervals > 0) {
            let of_queries = if comptime!(side == Side::Queries) {
                at
            } else {
                there
            };
            let key_block = if comptime!(side == Side::Queries) {
                block
            } else {
                index % blocks
            };
            let mut inside = false.runtime();
            #[unroll]
            for interval in 0..structure.intervals {
                let range = of_queries + comptime!(BLOCK_BOUNDS + INTERVAL_BOUNDS * interval);
                inside = inside
                    || (key_block as i32 >= packed[range]
                        && (key_block as i32) < packed[range + 1]);
            }
            meets = meets && inside;
        }
        if meets {
            first = min(first, block as i32);
            end = block as i32 + 1i32;
        }
        block += units;
    }
    let first = reduced(first, Reduction::Smallest, units);
    let end = -reduced(-end, Reduction::Smallest, units);
    if UNIT_POS == 0u32 {
        packed[at + 3] = first;
        packed[at + 4] = end;
        if index == 0u32 {
            packed[counter as usize] = 0i32;
        }
    }
}

/// Computes the order in which cubes take the tiles of each sequence: longer tiles before shorter ones, see
/// [`crate::math::longest_first`]. A tile keeps a block of queries. The length of a tile is the size of its block range,
/// which this module's other kernels have written.
///
/// In `packed`, the bounds of the query blocks start at index `bounds`, and the order starts at index `order`, with
/// `blocks` entries per sequence. Entry `i` is the rank that the `i`-th tile of the order has without the order. Ranks
/// count from the last tile. One cube handles one tile: its units count the tiles that precede it.
#[cube(launch_unchecked)]
pub(crate) fn order_blocks(
    packed: &mut Tensor<i32>,
    bounds: u32,
    order: u32,
    blocks: u32,
    count: u32,
    #[comptime] structure: Structure,
    #[comptime] units: u32,
) {
    let index = CUBE_POS as u32;
    if index >= count {
        terminate!();
    }
    let size = comptime!(structure.query_block_bounds() as u32);
    let block = index % blocks;
    let first = index - block;
    let at = (bounds + size * index) as usize;
    let own = digits(packed[at + 3], packed[at + 4]);
    let mut before = 0i32;
    let mut other = UNIT_POS;
    while other < blocks {
        let at = (bounds + size * (first + other)) as usize;
        let others = digits(packed[at + 3], packed[at + 4]);
        let precedes = others & !own > own || other > block && own & !others <= others;
        before += i32::cast_from(precedes);
        other += units;
    }
    let before = reduced(before, Reduction::Sum, units);
    if UNIT_POS == 0u32 {
        packed[(order + first + before as u32) as usize] = (blocks - 1u32 - block) as i32;
    }
}

/// Returns the size of the range `first..end`, which may be empty, with one bit for each base-4 digit that is not 0. If
/// `a & !b > b`, the size of `a` has more digits than the size of `b`.
#[cube]
fn digits(first: i32, end: i32) -> u32 {
    let size = u32::cast_from(max(end - first, 0i32));
    (size | size << 1u32) & 0xAAAA_AAAAu32
}
