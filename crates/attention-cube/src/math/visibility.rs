//! What a query sees: causal mask, window, lengths, segments, mask. One definition for every engine.
//!
//! Causal mask, window and length leave each query one run of keys, `first_key(i)..end_key(i)`, whose
//! ends grow with `i`. So the keys of a tile of queries are one run too, the blocks outside of it are
//! never visited, and a block inside every query's run needs no test.

use crate::math::side::Side;
use cube_kit::overlap::load_element_now;
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
    /// Blocks that a sequence has bounds of.
    pub query_blocks: u32,
    pub key_blocks: u32,
}

/// Which structures hide keys beyond the window, known when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Structure {
    pub lengths: bool,
    /// Whether lengths are read before the launch before has ended.
    pub lengths_ahead: bool,
    pub segments: bool,
    pub mask: bool,
}

impl Structure {
    /// Whether a key between two visible ones can be hidden.
    pub(crate) const fn is_irregular(&self) -> bool {
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

/// What the queries of sequence `batch` see.
#[cube]
pub(crate) fn sight(
    extent: &Extent,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    batch: u32,
    #[comptime] structure: Structure,
) -> Sight {
    let mut length = extent.kv_len;
    if comptime!(structure.lengths) {
        let own = own_length(lengths_and_ids, batch, structure.lengths_ahead);
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

/// The length of a sequence, which come first of the packed integers.
#[cube]
fn own_length(
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    batch: u32,
    #[comptime] now: bool,
) -> i32 {
    #[comptime]
    match lengths_and_ids {
        ComptimeOption::Some(lengths_and_ids) => {
            load_element_now::<i32>(lengths_and_ids.as_slice(), batch as usize, now)
        }
        ComptimeOption::None => 0i32,
    }
}

/// One of the packed integers.
#[cube]
fn integer(lengths_and_ids: &ComptimeOption<&Tensor<i32>>, index: u32) -> i32 {
    #[comptime]
    match lengths_and_ids {
        ComptimeOption::Some(lengths_and_ids) => lengths_and_ids[index as usize],
        ComptimeOption::None => 0i32,
    }
}

/// The first key that query `i` sees.
#[cube]
fn first_key(sight: &Sight, i: i32) -> i32 {
    max(i + sight.offset - sight.left, 0i32)
}

/// One past the last key that query `i` sees; not above `first_key` if it sees none.
#[cube]
fn end_key(sight: &Sight, i: i32) -> i32 {
    max(
        min(i + sight.offset + sight.right + 1i32, sight.length),
        0i32,
    )
}

/// One query's run of keys, or one key's of queries.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Keys {
    pub first: i32,
    /// Not above `first` if there are none.
    pub end: i32,
}

/// The keys that query `i` sees by window and length; none if it does not exist.
#[cube]
pub(crate) fn keys_of(sight: &Sight, i: i32) -> Keys {
    Keys {
        first: first_key(sight, i),
        end: select(i < sight.q_len, end_key(sight, i), 0i32),
    }
}

/// The first query that sees key `j`.
#[cube]
fn first_query(sight: &Sight, j: i32) -> i32 {
    max(j - sight.offset - sight.right, 0i32)
}

/// One past the last query that sees key `j`.
#[cube]
fn end_query(sight: &Sight, j: i32) -> i32 {
    max(min(j - sight.offset + sight.left + 1i32, sight.q_len), 0i32)
}

/// The queries that see key `j` by window and length; none if it does not exist.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn queries_of(sight: &Sight, j: i32) -> Keys {
    Keys {
        first: first_query(sight, j),
        end: select(j < sight.length, end_query(sight, j), 0i32),
    }
}

/// What the rows of a tile see on the other side: the keys of a tile of queries, or the queries of a
/// tile of keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Run {
    /// What any row of the tile sees.
    pub first: i32,
    pub end: i32,
    /// What every row sees: nothing where rows of the tile do not exist.
    pub common_first: i32,
    pub common_end: i32,
}

/// The keys that a tile sees whose queries are `first..=last`; `full` where these are all of its rows.
#[cube]
pub(crate) fn visible_keys(sight: &Sight, first: i32, last: i32, full: bool) -> Run {
    Run {
        first: first_key(sight, first),
        end: end_key(sight, last),
        common_first: first_key(sight, last),
        common_end: select(full, end_key(sight, first), 0i32),
    }
}

/// The queries that see a tile whose keys are `first..=last`, if any; `full` where these are all of its
/// rows.
#[cube]
pub(crate) fn visible_queries(sight: &Sight, first: i32, last: i32, full: bool) -> Run {
    Run {
        first: first_query(sight, first),
        end: select(first <= last, end_query(sight, last), 0i32),
        common_first: first_query(sight, last),
        common_end: select(full, end_query(sight, first), 0i32),
    }
}

/// Whether every row of the tile sees every row of the block of `size` that starts at `first`.
#[cube]
pub(crate) fn is_whole(
    run: &Run,
    first: i32,
    #[comptime] size: i32,
    #[comptime] structure: Structure,
) -> bool {
    let mut whole = is_inside(run, first, size);
    if comptime!(structure.is_irregular()) {
        whole = false;
    }
    whole
}

/// Whether the block of `size` that starts at `first` is in every row's run.
#[cube]
pub(crate) fn is_inside(run: &Run, first: i32, #[comptime] size: i32) -> bool {
    first >= run.common_first && first + size <= run.common_end
}

/// Integers of a block of either side: the smallest and the largest id in it, a bit for each id modulo 32, by which a block that
/// ends in padding does not meet all documents between, and, of the side that tiles hold, the first block of the other side that
/// may share a document with it and one past the last.
pub(crate) const BLOCK_BOUNDS: usize = 5;

/// Where a block's integers start.
#[cube]
fn bounds_of(extent: &Extent, batch: u32, block: u32, #[comptime] side: Side) -> u32 {
    let mut start = extent.query_bounds;
    let mut blocks = extent.query_blocks;
    if comptime!(side == Side::Keys) {
        start = extent.key_bounds;
        blocks = extent.key_blocks;
    }
    start + comptime!(BLOCK_BOUNDS as u32) * (batch * blocks + block)
}

/// Blocks of the other side, from the first to before the end.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Blocks {
    pub first: i32,
    /// Not above `first` if there are none.
    pub end: i32,
}

/// Those of the blocks `first..end` that may share a document with the tile that is the `block`-th of its side, and some between
/// them.
#[cube]
pub(crate) fn within_segments(
    first: i32,
    end: i32,
    extent: &Extent,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    batch: u32,
    block: u32,
    #[comptime] side: Side,
    #[comptime] structure: Structure,
) -> Blocks {
    if comptime!(structure.segments) {
        let at = bounds_of(extent, batch, block, side);
        Blocks {
            first: max(first, integer(lengths_and_ids, at + 3u32)),
            end: min(end, integer(lengths_and_ids, at + 4u32)),
        }
    } else {
        Blocks { first, end }
    }
}

/// Whether a block of a sequence's queries and one of its keys can see each other by their segments:
/// the ranges of their ids overlap, and so do their bits.
#[cube]
pub(crate) fn segments_meet(
    extent: &Extent,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    batch: u32,
    query_block: u32,
    key_block: u32,
    #[comptime] structure: Structure,
) -> bool {
    let mut meet = true;
    if comptime!(structure.segments) {
        let query_at = bounds_of(extent, batch, query_block, Side::Queries);
        let key_at = bounds_of(extent, batch, key_block, Side::Keys);
        meet = integer(lengths_and_ids, query_at) <= integer(lengths_and_ids, key_at + 1u32)
            && integer(lengths_and_ids, key_at) <= integer(lengths_and_ids, query_at + 1u32)
            && integer(lengths_and_ids, query_at + 2u32) & integer(lengths_and_ids, key_at + 2u32)
                != 0i32;
    }
    meet
}

/// The documents of a block's tokens.
#[cfg(feature = "cuda")]
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Documents {
    /// The smallest and the largest id.
    pub first: i32,
    pub last: i32,
}

/// The documents of a block of either side; without segments all are of one.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn documents_of(
    extent: &Extent,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    batch: u32,
    block: u32,
    #[comptime] side: Side,
    #[comptime] structure: Structure,
) -> Documents {
    if comptime!(structure.segments) {
        let at = bounds_of(extent, batch, block, side);
        Documents {
            first: integer(lengths_and_ids, at),
            last: integer(lengths_and_ids, at + 1u32),
        }
    } else {
        Documents {
            first: 0i32.runtime(),
            last: 0i32.runtime(),
        }
    }
}

/// The document of a token that exists, of either side.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn id_of(
    extent: &Extent,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    batch: u32,
    token: i32,
    #[comptime] side: Side,
) -> i32 {
    if comptime!(side == Side::Queries) {
        integer(
            lengths_and_ids,
            extent.query_ids + batch * extent.q_len as u32 + token as u32,
        )
    } else {
        integer(
            lengths_and_ids,
            extent.key_ids + batch * extent.kv_len as u32 + token as u32,
        )
    }
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
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    batch: u32,
    i: i32,
    j: i32,
    #[comptime] structure: Structure,
) -> bool {
    let keys = keys_of(sight, i);
    let mut visible = j >= keys.first && j < keys.end;
    if comptime!(structure.segments) {
        if visible {
            let query_at = extent.query_ids + batch * extent.q_len as u32 + i as u32;
            let key_at = extent.key_ids + batch * extent.kv_len as u32 + j as u32;
            visible = integer(lengths_and_ids, query_at) == integer(lengths_and_ids, key_at);
        }
    }
    visible
}
