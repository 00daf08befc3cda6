//! Joins the parts of an attention whose keys were split: `o = Σ exp(lseₛ − lse) oₛ` with
//! `lse = log Σ exp(lseₛ)`, and the sink as one more part without a value. A logsumexp comes and goes as its
//! reference and the logarithm of the sum by that: where scores are huge, one f32 would not keep both.
//!
//! Budget: 3 KB of shared memory at most, 6 registers of results. Bound by memory where rows are many: it reads `splits` partial
//! outputs once. Where they are few, as when one sequence is decoded, by the time that a read takes: then several units share the parts
//! of a row's 4 columns, and the first of them puts their results together, in the order of the parts.

use crate::math::rounding::rounded_vector;
use crate::math::score::LOWEST;
use cube_kit::overlap::{take_turn, was_written};
use cubecl::prelude::*;

/// Units of a cube.
pub(crate) const UNITS: usize = 128;

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
    #[comptime] sharing: usize,
    #[comptime] overlaps: bool,
    #[define(O)] _element: ElemType,
    #[define(F)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
) {
    take_turn(overlaps);
    was_written(partial_output, overlaps);
    was_written(partial_logsumexp, overlaps);
    let columns = comptime!((UNITS / sharing) as u32);
    let index = CUBE_POS * columns as usize + (UNIT_POS % columns) as usize;
    let first_split = UNIT_POS / columns;
    let row = index / row_vectors as usize;
    let column = index % row_vectors as usize;
    let exists = row < rows as usize;
    // Where no row is, there are no parts.
    let own = joined::<N>(
        partial_output,
        partial_logsumexp,
        row,
        column,
        first_split,
        select(exists, splits, 0u32),
        rows as usize,
        splits as usize * rows as usize,
        row_vectors,
        sharing,
    );
    let own = if comptime!(sharing > 1) {
        put_together::<N>(own, sharing)
    } else {
        own
    };
    if exists && first_split == 0u32 {
        let mut largest = own.largest;
        let mut sum = own.sum;
        let mut total = own.total;
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
            logsumexp[row + rows as usize] = select(empty, 0.0f32, sum.ln());
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
    #[comptime] step: usize,
) -> Joined<N> {
    let mut largest = f32::new(LOWEST);
    let mut split = first;
    while split < end {
        largest = max(largest, partial_logsumexp[split as usize * rows + row]);
        split += comptime!(step as u32);
    }
    let mut sum = 0.0f32;
    let mut total = Vector::<f32, N>::new(0.0);
    let mut split = first;
    while split < end {
        let at = split as usize * rows + row;
        let logarithm = partial_logsumexp[at + to_logarithms];
        let weight = ((partial_logsumexp[at] - largest) + logarithm).exp();
        sum += weight;
        let part = partial_output[at * row_vectors as usize + column];
        total += Vector::<f32, N>::cast_from(weight) * part;
        split += comptime!(step as u32);
    }
    Joined::<N> {
        largest,
        sum,
        total,
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
