//! Decides which keys a query sees, by causal mask, window, lengths, segments, intervals and mask.
//!
//! Causal mask, window and length give each query one contiguous range of keys, `first_key(i)..end_key(i)`. Both ends grow
//! with `i`, so a tile of queries also sees one contiguous range of keys. Kernels skip key blocks outside of the tile's
//! range.

use crate::math::side::Side;
use cube_kit::pdl::load_element_now;
use cubecl::prelude::*;

/// The value of a window size (left or right) without a limit. The value is larger than every position, and small
/// enough that its sum with a position fits in i32.
pub(crate) const OPEN: i32 = 1 << 30;

/// The sequence lengths and the window of a problem, and the layout of the packed i32 buffer. The buffer holds lengths,
/// segment ids, key intervals and bounds of blocks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct SeqLens {
    pub q_len: i32,
    pub kv_len: i32,
    /// The number of visible keys to the left of a query's own position, or [`OPEN`].
    pub left: i32,
    /// The number of visible keys to the right of a query's own position, or [`OPEN`]. The field is 0 for causal attention.
    pub right: i32,
    /// 1 if the last query is aligned with the last key, and 0 if the first query is aligned with the first key.
    pub bottom_right: i32,
    /// This field and the next three are the offsets of four regions of the packed i32 buffer, in i32 values: query
    /// records (segment id and intervals), segment ids of the keys, bounds of the query blocks, and bounds of the key
    /// blocks.
    pub query_ids: u32,
    pub key_ids: u32,
    pub query_bounds: u32,
    pub key_bounds: u32,
    /// This field is the number of query blocks per sequence. The field `key_blocks` is the number of key blocks. For
    /// each block, the packed buffer holds the bounds that [`BLOCK_BOUNDS`] describes.
    pub query_blocks: u32,
    pub key_blocks: u32,
}

/// The kinds of masking that a compiled kernel supports, in addition to causal mask and window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Structure {
    pub lengths: bool,
    /// True if the kernel reads the lengths before the previous launch has ended. Programmatic dependent launch (PDL)
    /// makes such early reads possible.
    pub lengths_ahead: bool,
    /// True if every sequence has its own number of queries.
    pub query_lengths: bool,
    pub segments: bool,
    /// The number of key intervals per query: 0, 1 or 2. A query sees the keys in the union of its intervals.
    pub intervals: usize,
    pub mask: bool,
    /// The numbers of queries and of keys per element of the mask.
    pub mask_block: [usize; 2],
}

impl Structure {
    /// Returns the kinds of masking of a problem without segments, intervals and mask. `lengths` is true if every sequence
    /// has its own number of keys.
    pub(crate) const fn of_key_lengths(lengths: bool) -> Self {
        Self {
            lengths,
            lengths_ahead: false,
            query_lengths: false,
            segments: false,
            intervals: 0,
            mask: false,
            mask_block: [1, 1],
        }
    }

    /// True if a key that a query does not see can lie between two keys that the query sees.
    pub(crate) const fn is_irregular(&self) -> bool {
        self.segments || self.intervals > 0 || self.mask
    }

    /// True if the mask has one element per block of queries and block of keys, not one element per score.
    pub(crate) const fn has_block_mask(&self) -> bool {
        self.mask && (self.mask_block[0] != 1 || self.mask_block[1] != 1)
    }

    /// Returns the numbers of rows and of columns per element of the mask, for a tile whose rows are of `side`.
    #[cfg(feature = "cuda")]
    pub(crate) const fn mask_element(&self, side: Side) -> [usize; 2] {
        let [queries, keys] = self.mask_block;
        match side {
            Side::Queries => [queries, keys],
            Side::Keys => [keys, queries],
        }
    }

    /// The number of i32 values per sequence at the start of the packed buffer. One value is the sequence's number of keys,
    /// and one is its number of queries. The buffer may hold both, one or none.
    pub(crate) const fn lengths_record(&self) -> usize {
        self.lengths as usize + self.query_lengths as usize
    }

    /// True if the packed i32 buffer has bounds of blocks. Kernels use the bounds to skip hidden blocks.
    pub(crate) const fn has_bounds(&self) -> bool {
        self.segments || self.intervals > 0
    }

    /// The number of i32 values in a query's record in the packed buffer: the segment id (if any), and the first key and the
    /// end of each interval.
    pub(crate) const fn query_record(&self) -> usize {
        self.segments as usize + 2 * self.intervals
    }

    /// The number of i32 values per block of queries in the packed buffer: [`BLOCK_BOUNDS`], plus [`INTERVAL_BOUNDS`] for each
    /// interval of a query.
    pub(crate) const fn query_block_bounds(&self) -> usize {
        BLOCK_BOUNDS + INTERVAL_BOUNDS * self.intervals
    }

    /// The number of i32 values per block of `side` (queries or keys) in the packed buffer.
    pub(crate) const fn bounds_of_side(&self, side: Side) -> u32 {
        match side {
            Side::Queries => self.query_block_bounds() as u32,
            Side::Keys => BLOCK_BOUNDS as u32,
        }
    }
}

/// The lengths and the window of one sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct SeqInfo {
    /// The number of queries.
    pub q_len: i32,
    /// The number of valid keys.
    pub length: i32,
    /// The key position that is aligned with query 0.
    pub offset: i32,
    pub left: i32,
    pub right: i32,
}

/// Returns the lengths and the window of sequence `batch`.
#[cube]
pub(crate) fn seq_info(
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    batch: u32,
    #[comptime] structure: Structure,
) -> SeqInfo {
    let mut length = seq_lens.kv_len;
    if comptime!(structure.lengths) {
        let at = batch * comptime!(structure.lengths_record() as u32);
        let own = own_length(lengths_and_ids, at, structure.lengths_ahead);
        length = min(max(own, 0i32), length);
    }
    let mut q_len = seq_lens.q_len;
    if comptime!(structure.query_lengths) {
        let record = comptime!(structure.lengths_record() as u32);
        let own = own_length(lengths_and_ids, batch * record + record - 1u32, false);
        q_len = min(max(own, 0i32), q_len);
    }
    let offset = (length - q_len) * seq_lens.bottom_right;
    SeqInfo {
        q_len,
        length,
        offset,
        left: seq_lens.left,
        right: seq_lens.right,
    }
}

/// Returns the sequence length at `index`. The lengths are at the start of the packed i32 buffer.
#[cube]
fn own_length(
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    index: u32,
    #[comptime] now: bool,
) -> i32 {
    #[comptime]
    match lengths_and_ids {
        ComptimeOption::Some(lengths_and_ids) => {
            load_element_now::<i32>(lengths_and_ids.as_slice(), index as usize, now)
        }
        ComptimeOption::None => 0i32,
    }
}

/// Returns the element at `index` of the packed i32 buffer.
#[cube]
pub(crate) fn integer(lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>, index: u32) -> i32 {
    #[comptime]
    match lengths_and_ids {
        ComptimeOption::Some(lengths_and_ids) => lengths_and_ids[index as usize],
        ComptimeOption::None => 0i32,
    }
}

/// Returns the first key that query `i` sees.
#[cube]
fn first_key(seq_info: &SeqInfo, i: i32) -> i32 {
    max(i + seq_info.offset - seq_info.left, 0i32)
}

/// Returns the index after the last key that query `i` sees. If the query sees no key, the result is at most `first_key`.
#[cube]
fn end_key(seq_info: &SeqInfo, i: i32) -> i32 {
    max(
        min(i + seq_info.offset + seq_info.right + 1i32, seq_info.length),
        0i32,
    )
}

/// A range of keys that one query sees, or a range of queries that see one key.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Keys {
    pub first: i32,
    /// The index after the last key or query of the range. The index is at most `first` if the range is empty.
    pub end: i32,
}

/// Returns the range of keys that are visible to query `i` under the window and the sequence's length. The range is
/// empty if the query does not exist.
#[cube]
pub(crate) fn keys_of(seq_info: &SeqInfo, i: i32) -> Keys {
    Keys {
        first: first_key(seq_info, i),
        end: select(i < seq_info.q_len, end_key(seq_info, i), 0i32),
    }
}

/// Returns the first query that sees key `j`.
#[cube]
fn first_query(seq_info: &SeqInfo, j: i32) -> i32 {
    max(j - seq_info.offset - seq_info.right, 0i32)
}

/// Returns the index after the last query that sees key `j`.
#[cube]
fn end_query(seq_info: &SeqInfo, j: i32) -> i32 {
    max(
        min(j - seq_info.offset + seq_info.left + 1i32, seq_info.q_len),
        0i32,
    )
}

/// Returns the range of queries to which key `j` is visible under the window and the lengths. The range is empty if the
/// key does not exist.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn queries_of(seq_info: &SeqInfo, j: i32) -> Keys {
    Keys {
        first: first_query(seq_info, j),
        end: select(j < seq_info.length, end_query(seq_info, j), 0i32),
    }
}

/// Two ranges of keys for a tile of queries, or two ranges of queries for a tile of keys. The first range contains the
/// keys or queries that form a visible score with at least one row of the tile. The second range contains those that
/// form a visible score with every row. The ranges consider only causal mask, window and lengths.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Run {
    /// The fields `first` and `end` give the range of keys or queries that form a visible score with at least one row
    /// of the tile.
    pub first: i32,
    pub end: i32,
    /// The fields `common_first` and `common_end` give the range of keys or queries that form a visible score with
    /// every row of the tile. The range is empty if the tile reaches past the end of the sequence.
    pub common_first: i32,
    pub common_end: i32,
}

/// Returns the two ranges of keys for the queries `first..=last` of a tile. `full` is true if all rows of the tile are
/// rows of the tensor.
#[cube]
pub(crate) fn visible_keys(
    seq_info: &SeqInfo,
    first: i32,
    last: i32,
    full: bool,
    #[comptime] structure: Structure,
) -> Run {
    if comptime!(structure.query_lengths) {
        let last_own = min(last, seq_info.q_len - 1i32);
        let full = full && last == last_own;
        Run {
            first: first_key(seq_info, first),
            end: select(first <= last_own, end_key(seq_info, last_own), 0i32),
            common_first: first_key(seq_info, last_own),
            common_end: select(full, end_key(seq_info, first), 0i32),
        }
    } else {
        Run {
            first: first_key(seq_info, first),
            end: end_key(seq_info, last),
            common_first: first_key(seq_info, last),
            common_end: select(full, end_key(seq_info, first), 0i32),
        }
    }
}

/// Returns the two ranges of queries for the keys `first..=last` of a tile. `full` is true if all rows of the tile are
/// rows of the tensor.
#[cube]
pub(crate) fn visible_queries(seq_info: &SeqInfo, first: i32, last: i32, full: bool) -> Run {
    Run {
        first: first_query(seq_info, first),
        end: select(first <= last, end_query(seq_info, last), 0i32),
        common_first: first_query(seq_info, last),
        common_end: select(full, end_query(seq_info, first), 0i32),
    }
}

/// True if all scores of a tile and a streamed block are visible. The block starts at row `first` and has `size` rows.
#[cube]
pub(crate) fn is_whole(
    run: &Run,
    first: i32,
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    batch: u32,
    query_block: u32,
    key_block: u32,
    #[comptime] size: i32,
    #[comptime] structure: Structure,
) -> bool {
    let mut whole = is_inside(run, first, size);
    if comptime!(structure.segments || structure.mask) {
        whole = false;
    } else if comptime!(structure.intervals > 0) {
        whole = whole
            && is_within_intervals(
                seq_lens,
                lengths_and_ids,
                batch,
                query_block,
                key_block,
                structure,
            );
    }
    whole
}

/// True if the block of `size` rows from row `first` on lies in the range that is visible to every row of the tile.
#[cube]
pub(crate) fn is_inside(run: &Run, first: i32, #[comptime] size: i32) -> bool {
    first >= run.common_first && first + size <= run.common_end
}

/// The number of i32 values in the packed buffer for each block of queries or keys. The values are the smallest and the
/// largest segment id, a bit set of the ids modulo 32, and a block range (two values).
///
/// Some ids between the smallest and the largest id may not occur in the block. The bit set rules out most of these
/// ids.
///
/// The block range of a query block covers key blocks, and the block range of a key block covers query blocks. Segments
/// and intervals hide all blocks outside of the range. If a kernel's tiles keep queries, only query blocks have a
/// range. If the tiles keep keys, only key blocks have a range.
pub(crate) const BLOCK_BOUNDS: usize = 5;

/// The number of i32 values that a block of queries has for each interval of a query. The values are two ranges of key
/// blocks.
///
/// The first range covers the key blocks with at least one key that is visible to at least one query of the block. The
/// second range covers the key blocks in which every key is visible to every query of the block.
pub(crate) const INTERVAL_BOUNDS: usize = 4;

/// Returns the offset of a block's bounds in the packed i32 buffer. `block` is the block's index among the blocks of `side`
/// (queries or keys).
#[cube]
fn bounds_of(
    seq_lens: &SeqLens,
    batch: u32,
    block: u32,
    #[comptime] side: Side,
    #[comptime] structure: Structure,
) -> u32 {
    let mut start = seq_lens.query_bounds;
    let mut blocks = seq_lens.query_blocks;
    if comptime!(side == Side::Keys) {
        start = seq_lens.key_bounds;
        blocks = seq_lens.key_blocks;
    }
    start + comptime!(structure.bounds_of_side(side)) * (batch * blocks + block)
}

/// A range of the blocks that a kernel streams: blocks of keys for a tile of queries, or blocks of queries for a tile
/// of keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Blocks {
    pub first: i32,
    /// The index after the last block. The index is at most `first` if the range is empty.
    pub end: i32,
}

/// Narrows the range `first..end` of streamed blocks. The result contains all streamed blocks that tile `block` may see
/// under segments and intervals.
#[cube]
pub(crate) fn within_bounds(
    first: i32,
    end: i32,
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    batch: u32,
    block: u32,
    #[comptime] side: Side,
    #[comptime] structure: Structure,
) -> Blocks {
    if comptime!(structure.has_bounds()) {
        let at = bounds_of(seq_lens, batch, block, side, structure);
        Blocks {
            first: max(first, integer(lengths_and_ids, at + 3u32)),
            end: min(end, integer(lengths_and_ids, at + 4u32)),
        }
    } else {
        Blocks { first, end }
    }
}

/// True if a query of block `query_block` may see a key of block `key_block` under segments and intervals.
#[cube]
pub(crate) fn blocks_meet(
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    batch: u32,
    query_block: u32,
    key_block: u32,
    #[comptime] structure: Structure,
) -> bool {
    let mut meet = true;
    if comptime!(structure.segments) {
        let query_at = bounds_of(seq_lens, batch, query_block, Side::Queries, structure);
        let key_at = bounds_of(seq_lens, batch, key_block, Side::Keys, structure);
        meet = integer(lengths_and_ids, query_at) <= integer(lengths_and_ids, key_at + 1u32)
            && integer(lengths_and_ids, key_at) <= integer(lengths_and_ids, query_at + 1u32)
            && integer(lengths_and_ids, query_at + 2u32) & integer(lengths_and_ids, key_at + 2u32)
                != 0i32;
    }
    if comptime!(structure.intervals > 0) {
        let at = bounds_of(seq_lens, batch, query_block, Side::Queries, structure);
        meet = meet
            && is_in_block_range(
                lengths_and_ids,
                at + comptime!(BLOCK_BOUNDS as u32),
                key_block,
                structure,
            );
    }
    meet
}

/// True if there is an interval index at which every query of block `query_block` sees every key of block `key_block`.
/// The structure must have intervals.
#[cube]
pub(crate) fn is_within_intervals(
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    batch: u32,
    query_block: u32,
    key_block: u32,
    #[comptime] structure: Structure,
) -> bool {
    let at = bounds_of(seq_lens, batch, query_block, Side::Queries, structure);
    let whole = at + comptime!(BLOCK_BOUNDS as u32 + 2u32);
    is_in_block_range(lengths_and_ids, whole, key_block, structure)
}

/// True if a key block lies in the block range of at least one interval. `at` is the offset of the first interval's
/// block range in the packed i32 buffer. The ranges of neighboring intervals are [`INTERVAL_BOUNDS`] values apart.
#[cube]
fn is_in_block_range(
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    at: u32,
    key_block: u32,
    #[comptime] structure: Structure,
) -> bool {
    let mut inside = false.runtime();
    #[unroll]
    for interval in 0..structure.intervals {
        let at = at + comptime!((INTERVAL_BOUNDS * interval) as u32);
        let first = integer(lengths_and_ids, at);
        let end = integer(lengths_and_ids, at + 1u32);
        inside = inside || (key_block as i32 >= first && (key_block as i32) < end);
    }
    inside
}

/// Returns the offset of a query's record (segment id and intervals) in the packed i32 buffer.
#[cube]
fn record_of(seq_lens: &SeqLens, batch: u32, query: i32, #[comptime] structure: Structure) -> u32 {
    if comptime!(structure.query_record() == 1) {
        seq_lens.query_ids + batch * seq_lens.q_len as u32 + query as u32
    } else {
        let record = comptime!(structure.query_record() as u32);
        seq_lens.query_ids + record * (batch * seq_lens.q_len as u32 + query as u32)
    }
}

/// Returns the range of keys in one interval of an existing query. `interval` is the index of the interval, counted from 0.
#[cube]
pub(crate) fn interval_of(
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    batch: u32,
    query: i32,
    #[comptime] interval: usize,
    #[comptime] structure: Structure,
) -> Keys {
    let at = record_of(seq_lens, batch, query, structure)
        + comptime!((structure.segments as usize + 2 * interval) as u32);
    Keys {
        first: integer(lengths_and_ids, at),
        end: integer(lengths_and_ids, at + 1u32),
    }
}

/// The range of document ids (segment ids) that occur in a block.
#[cfg(feature = "cuda")]
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Documents {
    /// The smallest id (`first`) and the largest id (`last`).
    pub first: i32,
    pub last: i32,
}

/// Returns the range of document ids (segment ids) in a block. If the problem has no segments, all tokens are in one
/// document.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn documents_of(
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    batch: u32,
    block: u32,
    #[comptime] side: Side,
    #[comptime] structure: Structure,
) -> Documents {
    if comptime!(structure.segments) {
        let at = bounds_of(seq_lens, batch, block, side, structure);
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

/// Returns the document id (segment id) of an existing token.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn id_of(
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    batch: u32,
    token: i32,
    #[comptime] side: Side,
    #[comptime] structure: Structure,
) -> i32 {
    if comptime!(side == Side::Queries) {
        integer(
            lengths_and_ids,
            record_of(seq_lens, batch, token, structure),
        )
    } else {
        integer(
            lengths_and_ids,
            seq_lens.key_ids + batch * seq_lens.kv_len as u32 + token as u32,
        )
    }
}

/// True if window, length, segments and intervals all let query `i` see key `j`. Query and key must exist.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(crate) fn sees(
    seq_info: &SeqInfo,
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    batch: u32,
    i: i32,
    j: i32,
    #[comptime] structure: Structure,
) -> bool {
    let keys = keys_of(seq_info, i);
    let mut visible = j >= keys.first && j < keys.end;
    if comptime!(structure.segments) {
        if visible {
            let query_at = record_of(seq_lens, batch, i, structure);
            let key_at = seq_lens.key_ids + batch * seq_lens.kv_len as u32 + j as u32;
            visible = integer(lengths_and_ids, query_at) == integer(lengths_and_ids, key_at);
        }
    }
    if comptime!(structure.intervals > 0) {
        if visible {
            visible = false;
            #[unroll]
            for interval in 0..structure.intervals {
                let keys = interval_of(seq_lens, lengths_and_ids, batch, i, interval, structure);
                visible = visible || (j >= keys.first && j < keys.end);
            }
        }
    }
    visible
}
