//! Cuts a problem into blocks of sequences, heads, queries and keys.

use super::bounds::{Bounds, Seen};
use crate::problem::AttentionProblem;
use std::ops::Range;

/// The sizes of the blocks into which a problem is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// The largest number of score rows in a block for each key head. A key head has one score row for each pair of a
    /// query and a query head of the GQA group.
    pub rows: usize,
    /// The number of keys per block.
    pub keys: usize,
    /// The largest number of scores in a block that covers several heads or several sequences.
    pub scores: usize,
}

impl Sizes {
    /// The block sizes that are used for every head size and sequence length. Block sizes from 128 × 128 to 512 × 256
    /// (rows × keys) were measured for causal and full calls over 2,048 tokens. The processor times with these block
    /// sizes differ by less than a third. Larger blocks compute more hidden scores, and smaller blocks run more
    /// operations.
    ///
    /// A block of 2¹⁸ scores takes 1 MiB in f32, the size of a core's L2 cache on the measured AMD EPYC.
    pub const MEASURED: Self = Self {
        rows: 256,
        keys: 256,
        scores: 1 << 18,
    };
}

/// The ranges into which a problem is cut. A block takes one range from each list.
pub(super) struct Cuts {
    pub sequences: Vec<Range<usize>>,
    /// The ranges of key heads.
    pub heads: Vec<Range<usize>>,
    pub queries: Vec<Range<usize>>,
    pub keys: Vec<Range<usize>>,
}

impl Cuts {
    pub fn new(problem: &AttentionProblem, bounds: &Bounds, sizes: Sizes) -> Self {
        let group = problem.group();
        let queries = split(0..problem.q_len, (sizes.rows / group).max(1));
        let rows = group * queries[0].len();
        let (keys, longest) = match &queries[..] {
            [all] => {
                // With few rows, a block may have more keys, so that fewer tensor operations run.
                let room = sizes.scores / (rows * problem.kv_heads * problem.batch);
                keys_of_one_block(problem, bounds, all, sizes.keys, room)
            }
            _ => {
                let keys = split(0..problem.kv_len, sizes.keys);
                let longest = keys[0].len();
                (keys, longest)
            }
        };
        let of_head = rows * longest;
        let heads = (sizes.scores / of_head).clamp(1, problem.kv_heads);
        let sequences = match heads == problem.kv_heads {
            true => (sizes.scores / (of_head * heads)).clamp(1, problem.batch),
            false => 1,
        };
        Self {
            sequences: split(0..problem.batch, sequences),
            heads: split(0..problem.kv_heads, heads),
            queries,
            keys,
        }
    }

    /// Returns one range of query heads for each range of key heads.
    pub fn q_heads(&self, problem: &AttentionProblem) -> Vec<Range<usize>> {
        let group = problem.group();
        let ranges = self.heads.iter();
        ranges
            .map(|heads| heads.start * group..heads.end * group)
            .collect()
    }
}

/// Cuts the keys of a problem whose queries form a single block. Returns the ranges, and the length of the longest
/// visible range. The keys before all visible keys form one range, and the keys after all visible keys another.
fn keys_of_one_block(
    problem: &AttentionProblem,
    bounds: &Bounds,
    queries: &Range<usize>,
    size: usize,
    room: usize,
) -> (Vec<Range<usize>>, usize) {
    let all = 0..problem.kv_len;
    let is_seen = |keys: &Range<usize>| {
        bounds.seen(0..problem.batch, 0..problem.q_heads, queries, keys) != Seen::Nothing
    };
    let seen: Vec<_> = split(all.clone(), size)
        .into_iter()
        .filter(is_seen)
        .collect();
    let (Some(first), Some(last)) = (seen.first(), seen.last()) else {
        return (vec![all], 1);
    };
    let visible = split(first.start..last.end, size.max(room));
    let longest = visible[0].len();
    let outside = [0..first.start, last.end..problem.kv_len];
    let [before, after] = outside.map(|keys| (!keys.is_empty()).then_some(keys));
    let keys = before.into_iter().chain(visible).chain(after).collect();
    (keys, longest)
}

/// Splits a non-empty range into the fewest ranges of at most `most` elements. The first range is the longest.
fn split(range: Range<usize>, most: usize) -> Vec<Range<usize>> {
    let count = range.len().div_ceil(most.max(1));
    let size = range.len().div_ceil(count);
    let starts = range.clone().step_by(size);
    starts
        .map(|start| start..(start + size).min(range.end))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_range_has_equal_parts_and_covers_it() {
        assert_eq!(split(0..10, 4), [0..4, 4..8, 8..10]);
        assert_eq!(split(3..13, 5), [3..8, 8..13]);
        assert_eq!(split(0..260, 256), [0..130, 130..260]);
        assert_eq!(split(0..3, 2), [0..2, 2..3]);
    }
}
