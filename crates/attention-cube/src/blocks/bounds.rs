//! Decides on the host whether the queries of a block see all, some or none of the block's keys. The decision depends
//! on the causal mask, the window, the lengths, the segments, the intervals and the block mask.

use crate::problem::AttentionProblem;
use crate::reference::block::Block;
use burn::backend::{
    Backend, TensorMetadata, read_sync,
    tensor::{BoolTensor, IntTensor},
};
use burn::tensor::DType;
use std::ops::Range;

/// How many keys of a block the block's queries see. Masks, biases and mask mods may hide further keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// No query sees a key.
    Nothing,
    /// Some queries may see some keys.
    Something,
    /// Every query sees every key.
    Everything,
}

impl Seen {
    fn of(is_hidden: bool, is_visible: bool) -> Self {
        match (is_hidden, is_visible) {
            (true, _) => Self::Nothing,
            (_, true) => Self::Everything,
            _ => Self::Something,
        }
    }

    /// Returns what the queries see if they see only the keys that both conditions, `self` and `other`, allow.
    fn and(self, other: Self) -> Self {
        Self::of(
            self == Self::Nothing || other == Self::Nothing,
            self == Self::Everything && other == Self::Everything,
        )
    }
}

/// The lengths, segment ids and intervals of one sequence.
struct Sequence {
    q_len: i64,
    kv_len: i64,
    /// The segment ids of the queries (`query_ids`) and of the keys (`key_ids`). Without segments, both lists are
    /// empty.
    query_ids: Vec<i32>,
    key_ids: Vec<i32>,
    /// The first key and the end of each interval, for each query. Without intervals, the list is empty.
    intervals: Vec<i64>,
}

/// The causal mask, window, lengths, segments, intervals and block mask of a call, on the host.
pub(super) struct Bounds {
    problem: AttentionProblem,
    /// The data of each sequence, or `None` if the host cannot read the device's tensors synchronously. With `None`, no
    /// block is skipped.
    sequences: Option<Vec<Sequence>>,
    /// The block mask, or `None` if the call has none or if the host cannot read it synchronously.
    blocks: Option<Blocks>,
}

/// A block mask on the host.
struct Blocks {
    shape: [usize; 4],
    /// The elements of the mask, in the order of the shape.
    visible: Vec<bool>,
}

impl Bounds {
    /// Reads the bounds of a call. The block `whole` covers all queries and keys of the call.
    pub fn new<B: Backend>(whole: &Block<B>) -> Self {
        Self {
            problem: whole.problem.clone(),
            sequences: sequences(whole),
            blocks: (whole.problem.has_block_mask())
                .then(|| whole.inputs.mask.as_option().and_then(blocks::<B>))
                .flatten(),
        }
    }

    /// Returns whether `queries` see all, some or none of `keys`, over all of the given sequences and query heads
    /// together. A block mask can only turn the result to [`Seen::Nothing`].
    pub fn seen(
        &self,
        sequences: Range<usize>,
        q_heads: Range<usize>,
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) -> Seen {
        if !self.is_shown(&sequences, &q_heads, queries, keys) {
            return Seen::Nothing;
        }
        let Some(known) = &self.sequences else {
            return Seen::Something;
        };
        let [queries, keys] = [queries, keys].map(|rows| rows.start as i64..rows.end as i64);
        let of_all = known[sequences].iter();
        let of_all = of_all.map(|sequence| self.seen_of(sequence, queries.clone(), keys.clone()));
        of_all
            .reduce(|one, other| match one == other {
                true => one,
                false => Seen::Something,
            })
            .unwrap_or(Seen::Nothing)
    }

    /// False if the block mask hides all of these keys from all of these queries.
    fn is_shown(
        &self,
        sequences: &Range<usize>,
        q_heads: &Range<usize>,
        queries: &Range<usize>,
        keys: &Range<usize>,
    ) -> bool {
        let Some(Blocks { shape, visible }) = &self.blocks else {
            return true;
        };
        let [of_queries, of_keys] = self.problem.mask_block;
        let elements = |rows: &Range<usize>, size| rows.start / size..rows.end.div_ceil(size);
        let wanted = [
            sequences.clone(),
            q_heads.clone(),
            elements(queries, of_queries),
            elements(keys, of_keys),
        ];
        let [sequences, heads, rows, columns] = [0, 1, 2, 3].map(|dim| match shape[dim] {
            1 => 0..1,
            _ => wanted[dim].clone(),
        });
        let mut rows = sequences.flat_map(|sequence| {
            let rows = rows.clone();
            heads.clone().flat_map(move |head| {
                let first = (sequence * shape[1] + head) * shape[2];
                rows.clone().map(move |row| (first + row) * shape[3])
            })
        });
        rows.any(|row| visible[row + columns.start..row + columns.end].contains(&true))
    }

    fn seen_of(&self, sequence: &Sequence, queries: Range<i64>, keys: Range<i64>) -> Seen {
        let rows = queries.start..queries.end.min(sequence.q_len);
        let columns = keys.start..keys.end.min(sequence.kv_len);
        if rows.is_empty() || columns.is_empty() {
            return Seen::Nothing;
        }
        let problem = &self.problem;
        let mut seen = Seen::of(false, rows == queries && columns == keys);
        let offset = match problem.is_bottom_right() {
            true => sequence.kv_len - sequence.q_len,
            false => 0,
        };
        let (first, last) = (rows.start + offset, rows.end - 1 + offset);
        let reach = |keys: usize| keys.min(1 << 30) as i64;
        if let Some(right) = problem.right().map(reach) {
            let is_hidden = columns.start > last + right;
            seen = seen.and(Seen::of(is_hidden, columns.end - 1 <= first + right));
        }
        if let Some(left) = problem.window_left.map(reach) {
            let is_hidden = columns.end - 1 < first - left;
            seen = seen.and(Seen::of(is_hidden, columns.start >= last - left));
        }
        if problem.segments {
            let of_queries = span(&sequence.query_ids[indices(&rows)]);
            let of_keys = span(&sequence.key_ids[indices(&columns)]);
            let is_hidden = of_queries.0 > of_keys.1 || of_keys.0 > of_queries.1;
            let is_one = of_queries == of_keys && of_keys.0 == of_keys.1;
            seen = seen.and(Seen::of(is_hidden, is_one));
        }
        if problem.intervals > 0 {
            seen = seen.and(self.seen_in_intervals(sequence, &rows, &columns));
        }
        seen
    }

    fn seen_in_intervals(
        &self,
        sequence: &Sequence,
        rows: &Range<i64>,
        columns: &Range<i64>,
    ) -> Seen {
        let count = self.problem.intervals;
        let records = || sequence.intervals.chunks_exact(2 * count);
        let records = || {
            records()
                .skip(rows.start as usize)
                .take(indices(rows).len())
        };
        let is_outside = |interval: &[i64]| {
            let [start, end] = [interval[0], interval[1]];
            start >= end || start >= columns.end || end <= columns.start
        };
        let is_hidden = records().all(|record| record.chunks_exact(2).all(is_outside));
        let covers = |interval: &[i64]| interval[0] <= columns.start && interval[1] >= columns.end;
        let is_visible = records().all(|record| record.chunks_exact(2).any(covers));
        Seen::of(is_hidden, is_visible)
    }
}

fn indices(rows: &Range<i64>) -> Range<usize> {
    rows.start as usize..rows.end as usize
}

/// Returns the smallest and the largest id. `ids` must not be empty.
fn span(ids: &[i32]) -> (i32, i32) {
    let first = (i32::MAX, i32::MIN);
    ids.iter()
        .fold(first, |(low, high), id| (low.min(*id), high.max(*id)))
}

fn sequences<B: Backend>(whole: &Block<B>) -> Option<Vec<Sequence>> {
    let (inputs, problem) = (&whole.inputs, &whole.problem);
    let lengths = |tensor: Option<&IntTensor<B>>, most: usize| match tensor {
        None => Some(vec![most as i64; problem.batch]),
        Some(lengths) => {
            let lengths = integers::<B>(lengths, saturated)?;
            let clamped = lengths
                .into_iter()
                .map(|length| length.clamp(0, most as i64));
            Some(clamped.collect())
        }
    };
    let q_lens = lengths(inputs.query_lengths.as_option(), problem.q_len)?;
    let kv_lens = lengths(inputs.kv_lengths.as_option(), problem.kv_len)?;
    let optional = |tensor: Option<&IntTensor<B>>, of_u64| match tensor {
        None => Some(Vec::new()),
        Some(tensor) => integers::<B>(tensor, of_u64),
    };
    let query_ids = optional(inputs.query_segments.as_option(), u64::cast_signed)?;
    let key_ids = optional(inputs.key_segments.as_option(), u64::cast_signed)?;
    let intervals = optional(inputs.intervals.as_option(), saturated)?;
    let own = |all: &[i64], index: usize| {
        let count = all.len() / problem.batch;
        all[index * count..(index + 1) * count].to_vec()
    };
    // Keep only the lowest 32 bits. They hold the whole id, because segment ids must fit in 32 bits.
    let ids = |all: &[i64], index| own(all, index).into_iter().map(|id| id as i32).collect();
    let of_index = |index| Sequence {
        q_len: q_lens[index],
        kv_len: kv_lens[index],
        query_ids: ids(&query_ids, index),
        key_ids: ids(&key_ids, index),
        intervals: own(&intervals, index),
    };
    Some((0..problem.batch).map(of_index).collect())
}

/// Reads a block mask.
fn blocks<B: Backend>(mask: &BoolTensor<B>) -> Option<Blocks> {
    let shape = mask.shape();
    let data = read_sync(B::bool_into_data(mask.clone())).ok()?;
    Some(Blocks {
        shape: [0, 1, 2, 3].map(|dim| shape[dim]),
        visible: data.iter::<bool>().collect(),
    })
}

/// Reads an integer tensor of any dtype. `of_u64` converts the elements of a U64 tensor, which may exceed `i64::MAX`.
fn integers<B: Backend>(tensor: &IntTensor<B>, of_u64: fn(u64) -> i64) -> Option<Vec<i64>> {
    let data = read_sync(B::int_into_data(tensor.clone())).ok()?;
    Some(match tensor.dtype() {
        DType::U64 => data.iter::<u64>().map(of_u64).collect(),
        _ => data.iter::<i64>().collect(),
    })
}

fn saturated(integer: u64) -> i64 {
    i64::try_from(integer).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::CausalAlignment;
    use crate::testing::problem;

    fn bounds(change: impl FnOnce(&mut AttentionProblem, &mut Sequence)) -> Bounds {
        let mut problem = problem([1, 1, 1, 8, 12, 4]);
        let mut sequence = Sequence {
            q_len: 8,
            kv_len: 12,
            query_ids: Vec::new(),
            key_ids: Vec::new(),
            intervals: Vec::new(),
        };
        change(&mut problem, &mut sequence);
        Bounds {
            problem,
            sequences: Some(vec![sequence]),
            blocks: None,
        }
    }

    #[cfg(feature = "flex")]
    #[test]
    fn integers_in_u64_are_saturated_or_keep_their_low_bits() {
        use burn::backend::{Flex, ops::IntTensorOps, tensor::Device};
        use burn::tensor::TensorData;
        let data = TensorData::new(vec![u64::MAX, 7, 1 << 63], [3]);
        let tensor = Flex::int_from_data(data, &Device::<Flex>::default());
        let found = integers::<Flex>(&tensor, saturated);
        assert_eq!(found, Some(vec![i64::MAX, 7, i64::MAX]));
        let found = integers::<Flex>(&tensor, u64::cast_signed);
        assert_eq!(found, Some(vec![-1, 7, i64::MIN]));
    }

    #[test]
    fn seen_causal_block_is_classified_by_its_corners() {
        let bounds = bounds(|problem, _| problem.causal = Some(CausalAlignment::BottomRight));
        // Query `i` sees the keys up to `i + 4`.
        for (queries, keys, seen) in [
            (0..2, 0..5, Seen::Everything),
            (0..2, 0..6, Seen::Something),
            (0..2, 5..6, Seen::Something),
            (0..2, 6..12, Seen::Nothing),
        ] {
            assert_eq!(
                bounds.seen(0..1, 0..1, &queries, &keys),
                seen,
                "{queries:?} {keys:?}"
            );
        }
    }

    #[test]
    fn seen_window_and_lengths_hide_blocks() {
        let bounds = bounds(|problem, sequence| {
            problem.window_left = Some(2);
            sequence.kv_len = 9;
            sequence.q_len = 5;
        });
        // The position of query `i` is `i + 4`.
        for (queries, keys, seen) in [
            (0..2, 0..2, Seen::Nothing),
            (0..2, 0..3, Seen::Something),
            (0..2, 3..9, Seen::Everything),
            (0..2, 3..10, Seen::Something),
            (0..2, 9..12, Seen::Nothing),
            (5..8, 0..9, Seen::Nothing),
            (4..8, 6..9, Seen::Something),
        ] {
            assert_eq!(
                bounds.seen(0..1, 0..1, &queries, &keys),
                seen,
                "{queries:?} {keys:?}"
            );
        }
    }

    #[test]
    fn seen_segments_and_intervals_hide_blocks() {
        let segments = bounds(|problem, sequence| {
            problem.segments = true;
            sequence.query_ids = vec![1, 1, 1, 1, 2, 2, 3, 3];
            sequence.key_ids = vec![1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3];
        });
        let intervals = bounds(|problem, sequence| {
            problem.intervals = 1;
            sequence.intervals = [
                [0, 5],
                [0, 5],
                [0, 5],
                [0, 5],
                [5, 8],
                [5, 8],
                [8, 12],
                [8, 12],
            ]
            .concat();
        });
        for bounds in [segments, intervals] {
            for (queries, keys, seen) in [
                (0..4, 0..5, Seen::Everything),
                (0..4, 0..6, Seen::Something),
                (0..4, 5..8, Seen::Nothing),
                (4..8, 8..12, Seen::Something),
                (6..8, 0..8, Seen::Nothing),
            ] {
                assert_eq!(
                    bounds.seen(0..1, 0..1, &queries, &keys),
                    seen,
                    "{queries:?} {keys:?}"
                );
            }
        }
    }
}
