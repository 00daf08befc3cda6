//! What becomes of a tile's fragments: normalised, with their sinks, they go to the output and the logsumexp.

use super::softmax::finite;
use cube_kit::hopper::accumulator::{Pair, is_second};
use cube_kit::hopper::ptx::exp2;
use cubecl::prelude::*;

/// A row's result.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Normalised {
    /// On the row's output.
    pub factor: f32,
    /// The logsumexp is this and the logarithm of the sum by it.
    pub reference: f32,
    pub logarithm: f32,
}

/// Normalises a row of query head `head`; the sink joins the sum here, where it is no part of a split.
#[cube]
pub(crate) fn normalise<K: Float>(
    reference: f32,
    sum: f32,
    to_score: f32,
    head: u32,
    exists: bool,
    sinks: &ComptimeOption<&Tensor<K>>,
    negative_infinity: f32,
) -> Normalised {
    let score = finite(reference, negative_infinity);
    // Not by way of powers of two: where scores are huge, the backward sees every rounding of the logsumexp.
    let mut base = score * to_score;
    let mut sum = sum;
    let mut rescale = f32::new(1.0);
    #[comptime]
    match sinks {
        ComptimeOption::Some(sinks) => {
            if exists {
                let sink = f32::cast_from(sinks[head as usize * sinks.stride(0)]);
                let keys = select(sum == 0.0f32, negative_infinity, base);
                // A sink of −∞ beside no key leaves nothing.
                base = finite(max(keys, sink), negative_infinity);
                rescale = exp2((keys - base) * comptime!(std::f32::consts::LOG2_E));
                sum = sum * rescale + exp2((sink - base) * comptime!(std::f32::consts::LOG2_E));
            }
        }
        ComptimeOption::None => {}
    }
    let empty = sum == 0.0f32;
    Normalised {
        factor: select(empty, 0.0f32, rescale / sum),
        reference: select(empty, negative_infinity, base),
        logarithm: select(empty, 0.0f32, sum.ln()),
    }
}

/// Zeros in the rows whose factor is 0, which may hold anything: others of the tile may have seen NaN.
#[cube]
pub(crate) fn without_blind<NO: Size>(
    o: Vector<f32, NO>,
    factors: Pair,
    #[comptime] columns: usize,
) -> Vector<f32, NO> {
    let mut o = o;
    let first = factors.first == 0.0f32;
    let second = factors.second == 0.0f32;
    if plane_any(first || second) {
        #[unroll]
        for i in 0..columns / 2 {
            let blind = if comptime!(is_second(i)) {
                second
            } else {
                first
            };
            o.insert(i, select(blind, 0.0f32, o.extract(i)));
        }
    }
    o
}

/// Writes a row's logsumexp: the reference and, in the tensor's second half, the logarithm.
#[cube]
pub(crate) fn write_logsumexp(
    logsumexp: &mut Tensor<f32>,
    row: Normalised,
    part: u32,
    head: u32,
    query: i32,
    exists: bool,
) {
    let column = UNIT_POS % 4u32;
    if exists && column == 0u32 {
        let at = part as usize * logsumexp.stride(0)
            + head as usize * logsumexp.stride(1)
            + query as usize;
        let to_logarithms = logsumexp.shape(0) / 2 * logsumexp.stride(0);
        logsumexp[at] = row.reference;
        logsumexp[at + to_logarithms] = row.logarithm;
    }
}

/// Writes the first or the second of the thread's rows: `columns` columns from `first_column` on, as far as the
/// tensor's `value_dim` goes.
#[cube]
pub(crate) fn write_row<O: Float, N: Size, NO: Size>(
    o: Vector<f32, NO>,
    factor: f32,
    output: &mut Tensor<Vector<O, N>>,
    part: u32,
    head: u32,
    query: i32,
    exists: bool,
    #[comptime] which: usize,
    first_column: u32,
    #[comptime] columns: usize,
    #[comptime] value_dim: usize,
) {
    if exists {
        let base = part as usize * output.stride(0)
            + head as usize * output.stride(1)
            + query as usize * output.stride(2);
        let vector = output.vector_size();
        let end = comptime!(value_dim as u32);
        #[unroll]
        for tile in 0..columns / 8 {
            let column = first_column + comptime!(8 * tile as u32) + UNIT_POS % 4u32 * 2u32;
            let register = comptime!(4 * tile + 2 * which);
            let low = O::cast_from(o.extract(register) * factor);
            let high = O::cast_from(o.extract(comptime!(register + 1)) * factor);
            if comptime!(vector == 2) {
                if column < end {
                    let mut both = Vector::<O, N>::cast_from(low);
                    both.insert(1usize, high);
                    output[(base + column as usize) / 2] = both;
                }
            } else {
                if column < end {
                    output[base + column as usize] = Vector::cast_from(low);
                }
                if column + 1u32 < end {
                    output[base + column as usize + 1] = Vector::cast_from(high);
                }
            }
        }
    }
}
