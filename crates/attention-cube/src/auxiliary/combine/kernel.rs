//! Combines the partial outputs of split-KV attention: `o = Σ exp(lseₛ − lse) oₛ` with `lse = log Σ exp(lseₛ)`. Here
//! `oₛ` and `lseₛ` are the output and the LSE of split `s`. The sink acts as one more split whose output is zero.
//!
//! Inputs and outputs store an LSE as two numbers. The first number is the reference score, which the softmax
//! subtracted from all scores of the row before `exp`. The reference score is near the row maximum. The second number
//! is the logarithm of the sum of these exponentials. If scores are huge, one f32 for the sum of both numbers would
//! lose the logarithm.
//!
//! Budget: at most 3 KB of shared memory. Registers: 6 for results, plus 6 per split that a unit loads at once (4 or 8
//! splits).
//!
//! Bound: memory with many rows, because the kernel reads every partial output once. With few rows, as in the decode of
//! one sequence, the bound is the latency of a load. With 8 or more splits, several units therefore divide the splits
//! of 4 output columns, and one of these units combines the results. A unit issues the loads of its first 4 or 8 splits
//! before it uses any loaded value.

use crate::math::rounding::rounded_vector;
use crate::math::score::{LOWEST, saved_logarithm};
use cube_kit::pdl::{launch_dependents_and_wait, mark_owned_volatile_if_present, mark_volatile};
use cubecl::prelude::*;

/// The number of units per cube.
pub(crate) const UNITS: usize = 128;

/// The division of splits among units. Several units may combine the splits of one vector of an output row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sharing {
    /// The number of units that together combine the splits of one vector of an output row.
    pub units: usize,
    /// The number of splits that a unit loads at once.
    pub held: usize,
    /// True if a unit has more splits than it loads at once.
    pub more: bool,
}

/// The runtime sizes of the kernel `combine_pdl`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct CombineSizes {
    pub splits: u32,
    /// The number of output rows over all heads and sequences.
    pub rows: u32,
    pub q_len: u32,
    pub q_heads: u32,
    /// The number of vectors per output row.
    pub row_vectors: u32,
}

/// Combines the splits of every row, and adds the sink.
///
/// # Shapes
/// `partial_output [splits, rows, value_dim]` and `partial_logsumexp [2, splits, rows]` in f32;
/// `output [rows, value_dim]`; `logsumexp [2, rows]` in f32. `rows` is the number of queries over all heads and
/// sequences. In both `partial_logsumexp` and `logsumexp`, the first half holds the reference scores, and the second
/// half holds the logarithms of the softmax sums.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn combine_pdl<O: Float, F: Float, N: Size>(
    partial_output: &Tensor<Vector<f32, N>>,
    partial_logsumexp: &Tensor<f32>,
    sinks: ComptimeOption<OwnedTensor<F>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    sizes: CombineSizes,
    negative_infinity: f32,
    #[comptime] sharing: Sharing,
    #[comptime] pdl: bool,
    #[define(O, F)] _elements: [ElemType; 2],
    #[define(N)] _vector: usize,
) {
    let CombineSizes {
        splits,
        rows,
        q_len,
        q_heads,
        row_vectors,
    } = sizes;
    launch_dependents_and_wait(pdl);
    mark_volatile(partial_output, pdl);
    mark_volatile(partial_logsumexp, pdl);
    mark_owned_volatile_if_present(&sinks, pdl);
    let columns = comptime!((UNITS / sharing.units) as u32);
    let index = CUBE_POS * columns as usize + (UNIT_POS % columns) as usize;
    let first_split = UNIT_POS / columns;
    let row = index / row_vectors as usize;
    let column = index % row_vectors as usize;
    let exists = row < rows as usize;
    // A unit without a row gets an empty range of splits. The unit must not return early, because all units of the cube must
    // reach the later sync.
    let own = joined::<N>(
        partial_output,
        partial_logsumexp,
        select(exists, row, 0usize),
        column,
        first_split,
        select(exists, splits, 0u32),
        rows as usize,
        splits as usize * rows as usize,
        row_vectors,
        sharing,
    );
    let own = if comptime!(sharing.units > 1) {
        put_together::<N>(own, sharing.units)
    } else {
        own
    };
    if exists && first_split == 0u32 {
        let mut largest = own.largest;
        let mut sum = own.sum;
        let mut total = own.total;
        // If the softmax sum of a query is nonzero or NaN, the query sees at least one key. The sum is NaN if a visible
        // score is NaN.
        let has_keys = sum != 0.0f32;
        #[comptime]
        match &sinks {
            ComptimeOption::Some(sinks) => {
                let head = (row / q_len as usize) % q_heads as usize;
                let sink = f32::cast_from(sinks[head * sinks.stride(0)]);
                let before = largest;
                largest = max(largest, sink);
                let factor = (before - largest).exp();
                sum = sum * factor + (sink - largest).exp();
                total *= Vector::<f32, N>::cast_from(factor);
            }
            ComptimeOption::None => {}
        }
        let empty = sum == 0.0f32;
        let factor = select(empty, 0.0f32, 1.0f32 / sum);
        output[index] = rounded_vector::<O, N>(total * Vector::<f32, N>::cast_from(factor));
        if column == 0 {
            logsumexp[row] = select(empty, negative_infinity, largest);
            logsumexp[row + rows as usize] = saved_logarithm(sum, has_keys);
        }
    }
}

/// The combined result of several splits, for one vector of an output row. `largest` is the largest reference score of
/// these splits. The softmax sum and the weighted output are computed with `largest` as the reference score.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Joined<N: Size> {
    largest: f32,
    sum: f32,
    total: Vector<f32, N>,
}

/// Combines the splits of one unit, for one vector of an output row. These are every `sharing.units`-th split from
/// split `first` on, up to but not including split `end`.
#[cube]
fn joined<N: Size>(
    partial_output: &Tensor<Vector<f32, N>>,
    partial_logsumexp: &Tensor<f32>,
    row: usize,
    column: usize,
    first: u32,
    end: u32,
    rows: usize,
    to_logarithms: usize,
    row_vectors: u32,
    #[comptime] sharing: Sharing,
) -> Joined<N> {
    let held = comptime!(sharing.held);
    let mut references = Array::<f32>::new(held);
    let mut logarithms = Array::<f32>::new(held);
    let mut parts = Array::<Vector<f32, N>>::new(held);
    #[unroll]
    for index in 0..held {
        let split = first + comptime!((index * sharing.units) as u32);
        // If the unit has no split with this index, the unit loads split 0 and ignores the values. A branch around the
        // load would prevent the loads of different splits from overlapping.
        let split = select(split < end, split, 0u32);
        let at = split as usize * rows + row;
        references[index] = partial_logsumexp[at];
        logarithms[index] = partial_logsumexp[at + to_logarithms];
        parts[index] = partial_output[at * row_vectors as usize + column];
    }
    let after = first + comptime!((held * sharing.units) as u32);

    let mut largest = f32::new(LOWEST);
    #[unroll]
    for index in 0..held {
        let exists = first + comptime!((index * sharing.units) as u32) < end;
        largest = select(exists, max(largest, references[index]), largest);
    }
    if comptime!(sharing.more) {
        let mut split = after;
        while split < end {
            largest = max(largest, partial_logsumexp[split as usize * rows + row]);
            split += comptime!(sharing.units as u32);
        }
    }
    let mut own = Joined::<N> {
        largest,
        sum: 0.0f32,
        total: Vector::<f32, N>::new(0.0),
    };
    #[unroll]
    for index in 0..held {
        let exists = first + comptime!((index * sharing.units) as u32) < end;
        let with = with_part::<N>(own, references[index], logarithms[index], parts[index]);
        own.sum = select(exists, with.sum, own.sum);
        own.total = select(exists, with.total, own.total);
    }
    if comptime!(sharing.more) {
        let mut split = after;
        while split < end {
            let at = split as usize * rows + row;
            let with = with_part::<N>(
                own,
                partial_logsumexp[at],
                partial_logsumexp[at + to_logarithms],
                partial_output[at * row_vectors as usize + column],
            );
            own.sum = with.sum;
            own.total = with.total;
            split += comptime!(sharing.units as u32);
        }
    }
    own
}

/// Adds one split to `own`, the combined result of earlier splits. `own.largest` must be the largest reference score of all
/// splits of the unit.
#[cube]
fn with_part<N: Size>(
    own: Joined<N>,
    reference: f32,
    logarithm: f32,
    part: Vector<f32, N>,
) -> Joined<N> {
    let weight = ((reference - own.largest) + logarithm).exp();
    Joined::<N> {
        largest: own.largest,
        sum: own.sum + weight,
        total: own.total + Vector::<f32, N>::cast_from(weight) * part,
    }
}

/// Combines the results of all units that share a vector of an output row. Only the first of these units gets the complete
/// result.
#[cube]
fn put_together<N: Size>(own: Joined<N>, #[comptime] sharing: usize) -> Joined<N> {
    let mut references = Shared::<[f32]>::new_slice(UNITS);
    let mut sums = Shared::<[f32]>::new_slice(UNITS);
    let mut totals = Shared::<[Vector<f32, N>]>::new_slice(UNITS);
    let unit = UNIT_POS as usize;
    references[unit] = own.largest;
    sums[unit] = own.sum;
    totals[unit] = own.total;
    sync_cube();
    let columns = comptime!(UNITS / sharing);
    let first = unit % columns;
    let mut largest = f32::new(LOWEST);
    #[unroll]
    for other in 0..sharing {
        largest = max(largest, references[first + other * columns]);
    }
    let mut sum = 0.0f32;
    let mut total = Vector::<f32, N>::new(0.0);
    #[unroll]
    for other in 0..sharing {
        let at = first + other * columns;
        let factor = (references[at] - largest).exp();
        sum += sums[at] * factor;
        total += Vector::<f32, N>::cast_from(factor) * totals[at];
    }
    Joined::<N> {
        largest,
        sum,
        total,
    }
}
