//! Joins the parts of an attention whose keys were split: `o = Σ exp(lseₛ − lse) oₛ` with
//! `lse = log Σ exp(lseₛ)`, and the sink as one more part without a value. A logsumexp comes and goes as its
//! reference and the logarithm of the sum by that: where scores are huge, one f32 would not keep both.
//!
//! Budget: no shared memory, 4 accumulators. Bound by memory: it reads `splits` partial outputs once. One
//! unit has 4 columns of one row, and computes the row's weights for itself.

use crate::math::rounding::rounded_vector;
use crate::math::score::LOWEST;
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn combine<O: Float, F: Float, N: Size>(
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
    #[define(O)] _element: ElemType,
    #[define(F)] _sink_element: ElemType,
    #[define(N)] _vector: usize,
) {
    let index = ABSOLUTE_POS;
    let row = index / row_vectors as usize;
    if row >= rows as usize {
        terminate!();
    }
    let column = index % row_vectors as usize;
    let mut largest = f32::new(LOWEST);
    for split in 0..splits as usize {
        largest = max(largest, partial_logsumexp[split * rows as usize + row]);
    }
    let to_logarithms = splits as usize * rows as usize;
    let mut sum = 0.0f32;
    #[comptime]
    match &sinks {
        ComptimeOption::Some(sinks) => {
            let head = (row / q_len as usize) % q_heads as usize;
            let sink = f32::cast_from(sinks[head * sinks.stride(0)]);
            largest = max(largest, sink);
            sum += (sink - largest).exp();
        }
        ComptimeOption::None => {}
    }
    let mut total = Vector::<f32, N>::new(0.0);
    for split in 0..splits as usize {
        let at = split * rows as usize + row;
        let logarithm = partial_logsumexp[at + to_logarithms];
        let weight = ((partial_logsumexp[at] - largest) + logarithm).exp();
        sum += weight;
        let part = partial_output[at * row_vectors as usize + column];
        total += Vector::<f32, N>::cast_from(weight) * part;
    }
    let empty = sum == 0.0f32;
    let factor = select(empty, 0.0f32, 1.0f32 / sum);
    output[index] = rounded_vector::<O, N>(total * Vector::<f32, N>::cast_from(factor));
    if column == 0 {
        logsumexp[row] = select(empty, negative_infinity, largest);
        logsumexp[row + rows as usize] = select(empty, 0.0f32, sum.ln());
    }
}
