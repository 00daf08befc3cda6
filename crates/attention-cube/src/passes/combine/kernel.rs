//! Joins the parts of an attention whose keys were split: `o = Σ exp(lseₛ − lse) oₛ` with
//! `lse = log Σ exp(lseₛ)`, and the sink as one more part without a value. A logsumexp comes and goes as its
//! reference and the logarithm of the sum by that: where scores are huge, one f32 would not keep both.
//!
//! Budget: 3 KB of shared memory at most, 6 registers of results and 6 for each part that a unit reads at once, of which it has 4 or 8.
//! Bound by memory where rows are many: it reads `splits` partial outputs once. Where they are few, as when one sequence is decoded, by the
//! time that a read takes: then several units share the parts of a row's 4 columns, and the first of them puts their results together, in
//! the order of the parts. References, logarithms and parts are all on their way before the first is used; those beyond a unit's 8 wait for
//! them, and again for all references.

use crate::math::rounding::rounded_vector;
use crate::math::score::{LOWEST, saved_logarithm};
use cube_kit::overlap::{take_turn, was_written, was_written_if_there};
use cubecl::prelude::*;

/// Units of a cube.
pub(crate) const UNITS: usize = 128;

/// Which parts a unit has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sharing {
    /// Units that share the parts of a row's columns.
    pub units: usize,
    /// Parts that a unit reads at once.
    pub held: usize,
    /// Whether it has more of them.
    pub more: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn combine_overlapped<O: Float, F: Float, N: Size>(
    partial_output: &Tensor<Vector<f32, N>>,
    partial_logsumexp: &Tensor<f32>,
    sinks: ComptimeOption<&Tensor<F>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    splits: u32,
    rows: u32,
    q_len: u32,
    q_heads: u32,
    row_vectors: u32,
    negative_infinity: f32,
    #[comptime] sharing: Sharing,
    #[comptime] overlaps: bool,
    #[define(O)] _element: ElemType,
    #[define(F)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
) {
    take_turn(overlaps);
    was_written(partial_output, overlaps);
    was_written(partial_logsumexp, overlaps);
    was_written_if_there(sinks, overlaps);
    let columns = comptime!((UNITS / sharing.units) as u32);
    let index = CUBE_POS * columns as usize + (UNIT_POS % columns) as usize;
    let first_split = UNIT_POS / columns;
    let row = index / row_vectors as usize;
    let column = index % row_vectors as usize;
    let exists = row < rows as usize;
    // Where no row is, there are no parts.
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
        // A NaN among the scores is a key that is seen.
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

/// Some parts of a row's columns as one: the largest reference, and what they have by that.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Joined<N: Size> {
    largest: f32,
    sum: f32,
    total: Vector<f32, N>,
}

/// Every so many-th part of a row's columns, from the `first` to before `end`.
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
        // Where none is, the first part is read, and not used: a branch would be between this read and the next.
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

/// What there is and one part more, by the largest reference of all.
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

/// What the units that share a row's columns have, for the first of them.
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
