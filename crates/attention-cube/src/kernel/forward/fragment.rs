//! Scores and the online softmax on an accumulator's registers, which a warpgroup's threads hold by
//! fragments: a thread has two rows, 8 apart, and a quarter of their columns; the three others are its
//! neighbours.
//!
//! The running reference of a row is a former maximum: it moves only when a row of the warp has outgrown it
//! by 2^8, so that the output is seldom rescaled (FlashAttention-4 does likewise). P stays below 2^8 and the
//! sum below 2^8 times the number of keys, far from the limits of half precision and f32.

use crate::kernel::ptx::{exp2, pack};
use crate::kernel::score::{Place, ScoreArguments, ScoreKind, biased, capped, is_visible};
use crate::kernel::visibility::{Extent, Sight, Structure};
use crate::plan::wgmma::Half;
use cubecl::prelude::*;

/// A reference may fall behind the maximum by this power of two.
const OUTGROWN: f32 = 8.0;

/// A thread's two rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowPair {
    pub batch: u32,
    pub head_0: u32,
    pub head_1: u32,
    /// The number of queries, where the row does not exist.
    pub query_0: i32,
    pub query_1: i32,
}

/// What is compiled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FragmentKind {
    pub structure: Structure,
    pub score: ScoreKind,
    /// The score is the product, to be scaled in the exponential: no softcap, no bias, a positive scale.
    pub raw: bool,
}

/// Column of register `index`, from the fragment's first.
const fn column(index: usize) -> usize {
    index / 4 * 8 + index % 2
}

/// Whether register `index` is of the second row.
const fn is_second(index: usize) -> bool {
    index / 2 % 2 == 1
}

/// The scores of `columns` keys from `first_key` on, −∞ where hidden. In a `whole` block nothing is.
#[cube]
pub(crate) fn score<M: Numeric, F: Float, NS: Size>(
    s: Vector<f32, NS>,
    first_key: i32,
    whole: bool,
    rows: &RowPair,
    mask: &ComptimeOption<&Tensor<M>>,
    bias: &ComptimeOption<&Tensor<F>>,
    integers: &ComptimeOption<&Tensor<i32>>,
    sight: &Sight,
    extent: &Extent,
    arguments: &ScoreArguments,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> Vector<f32, NS> {
    let mut s = s;
    let own_key = first_key + ((UNIT_POS % 4u32) * 2u32) as i32;
    if whole {
        if comptime!(!kind.raw) {
            #[unroll]
            for i in 0..columns / 2 {
                let place = place(rows, own_key, i);
                let value = biased(
                    capped(s.extract(i), arguments, kind.score),
                    bias,
                    &place,
                    arguments.negative_infinity,
                );
                s.insert(i, value);
            }
        }
    } else {
        #[unroll]
        for i in 0..columns / 2 {
            let place = place(rows, own_key, i);
            let visible = is_visible(false, mask, sight, extent, integers, &place, kind.structure);
            if comptime!(kind.raw) {
                s.insert(
                    i,
                    select(visible, s.extract(i), arguments.negative_infinity),
                );
            } else {
                let mut value = arguments.negative_infinity;
                if visible {
                    value = biased(
                        capped(s.extract(i), arguments, kind.score),
                        bias,
                        &place,
                        arguments.negative_infinity,
                    );
                }
                s.insert(i, value);
            }
        }
    }
    s
}

/// Where register `index` stands.
#[cube]
fn place(rows: &RowPair, own_key: i32, #[comptime] index: usize) -> Place {
    let key = own_key + comptime!(column(index) as i32);
    if comptime!(is_second(index)) {
        Place {
            batch: rows.batch,
            head: rows.head_1,
            query: rows.query_1,
            key,
        }
    } else {
        Place {
            batch: rows.batch,
            head: rows.head_0,
            query: rows.query_0,
            key,
        }
    }
}

/// Two numbers of a thread's rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Pair {
    pub first: f32,
    pub second: f32,
}

/// The largest scores of the thread's rows over all `columns`, but not below `least`.
#[cube]
pub(crate) fn maxima<NS: Size>(
    s: Vector<f32, NS>,
    least: Pair,
    #[comptime] columns: usize,
) -> Pair {
    let mut first = least.first;
    let mut second = least.second;
    #[unroll]
    for i in 0..columns / 8 {
        first = max(first, max(s.extract(4 * i), s.extract(4 * i + 1)));
        second = max(second, max(s.extract(4 * i + 2), s.extract(4 * i + 3)));
    }
    first = max(first, plane_shuffle_xor(first, 1u32));
    second = max(second, plane_shuffle_xor(second, 1u32));
    first = max(first, plane_shuffle_xor(first, 2u32));
    second = max(second, plane_shuffle_xor(second, 2u32));
    Pair { first, second }
}

/// The sums of the threads that share the rows.
#[cube]
pub(crate) fn totals(sums: Pair) -> Pair {
    let mut first = sums.first;
    let mut second = sums.second;
    first += plane_shuffle_xor(first, 1u32);
    second += plane_shuffle_xor(second, 1u32);
    first += plane_shuffle_xor(first, 2u32);
    second += plane_shuffle_xor(second, 2u32);
    Pair { first, second }
}

/// New references, and the factors that bring older results to them.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct References {
    pub reference: Pair,
    pub factor: Pair,
}

/// Whether the references move to `maxima`, for all rows of the warp alike. `power` is the factor from
/// scores to powers of two.
#[cube]
pub(crate) fn follow(
    reference: Pair,
    maxima: Pair,
    power: f32,
    negative_infinity: f32,
) -> References {
    let mut first = reference.first;
    let mut second = reference.second;
    let mut factor_0 = f32::new(1.0);
    let mut factor_1 = f32::new(1.0);
    // Without a score yet both are −∞, and their difference is no number and not greater.
    if plane_any(
        (maxima.first - first) * power > OUTGROWN || (maxima.second - second) * power > OUTGROWN,
    ) {
        factor_0 = exp2((first - finite(maxima.first, negative_infinity)) * power);
        factor_1 = exp2((second - finite(maxima.second, negative_infinity)) * power);
        first = maxima.first;
        second = maxima.second;
    }
    References {
        reference: Pair { first, second },
        factor: Pair {
            first: factor_0,
            second: factor_1,
        },
    }
}

/// The reference, or 0 for a row that has seen nothing.
#[cube]
pub(crate) fn finite(reference: f32, negative_infinity: f32) -> f32 {
    select(reference == negative_infinity, 0.0f32, reference)
}

/// The numerators of 16 columns from `step` on: 4 registers of P, and what they add to the sums.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Numerators {
    pub p_0: u32,
    pub p_1: u32,
    pub p_2: u32,
    pub p_3: u32,
    pub sums: Pair,
    /// A bit for each of the thread's columns that some row of its sees, where that is asked for.
    pub used: u32,
}

/// `shift` is the reference in powers of two.
#[cube]
pub(crate) fn numerators<NS: Size>(
    s: Vector<f32, NS>,
    shift: Pair,
    power: f32,
    #[comptime] step: usize,
    #[comptime] half: Half,
    #[comptime] uses: bool,
) -> Numerators {
    let e_0 = exp2(fma(s.extract(8 * step), power, -shift.first));
    let e_1 = exp2(fma(s.extract(8 * step + 1), power, -shift.first));
    let e_2 = exp2(fma(s.extract(8 * step + 2), power, -shift.second));
    let e_3 = exp2(fma(s.extract(8 * step + 3), power, -shift.second));
    let e_4 = exp2(fma(s.extract(8 * step + 4), power, -shift.first));
    let e_5 = exp2(fma(s.extract(8 * step + 5), power, -shift.first));
    let e_6 = exp2(fma(s.extract(8 * step + 6), power, -shift.second));
    let e_7 = exp2(fma(s.extract(8 * step + 7), power, -shift.second));
    let mut used = 0u32;
    if comptime!(uses) {
        let first = comptime!(4 * step as u32);
        used = used_bit(e_0, e_2, first)
            | used_bit(e_1, e_3, comptime!(first + 1))
            | used_bit(e_4, e_6, comptime!(first + 2))
            | used_bit(e_5, e_7, comptime!(first + 3));
    }
    Numerators {
        p_0: pack(e_0, e_1, half),
        p_1: pack(e_2, e_3, half),
        p_2: pack(e_4, e_5, half),
        p_3: pack(e_6, e_7, half),
        sums: Pair {
            first: (e_0 + e_1) + (e_4 + e_5),
            second: (e_2 + e_3) + (e_6 + e_7),
        },
        used,
    }
}

/// Bit `bit` if either is not zero. Rows that do not exist hold anything, also NaN, and do not count.
#[cube]
fn used_bit(first: f32, second: f32, #[comptime] bit: u32) -> u32 {
    select(
        first > 0.0f32 || second > 0.0f32,
        comptime!(1u32 << bit),
        0u32,
    )
}

/// Multiplies `columns` columns of O, where the factors are not 1 in the whole warp.
#[cube]
pub(crate) fn rescale<NO: Size>(
    o: Vector<f32, NO>,
    factor: Pair,
    #[comptime] columns: usize,
) -> Vector<f32, NO> {
    let mut o = o;
    if plane_any(factor.first != 1.0f32 || factor.second != 1.0f32) {
        #[unroll]
        for i in 0..columns / 8 {
            o.insert(4 * i, o.extract(4 * i) * factor.first);
            o.insert(4 * i + 1, o.extract(4 * i + 1) * factor.first);
            o.insert(4 * i + 2, o.extract(4 * i + 2) * factor.second);
            o.insert(4 * i + 3, o.extract(4 * i + 3) * factor.second);
        }
    }
    o
}

/// A row's result.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Normalised {
    /// On the row's output.
    pub factor: f32,
    pub logsumexp: f32,
}

/// Normalises a row of query head `head`; the sink joins the sum here, where it is no part of a split.
#[cube]
pub(crate) fn normalise<K: Float>(
    reference: f32,
    sum: f32,
    power: f32,
    head: u32,
    exists: bool,
    sinks: &ComptimeOption<&Tensor<K>>,
    negative_infinity: f32,
) -> Normalised {
    let ln_2 = comptime!(std::f32::consts::LN_2);
    // In powers of two, like everything else here.
    let mut shift = finite(reference, negative_infinity) * power;
    let mut sum = sum;
    let mut rescale = f32::new(1.0);
    #[comptime]
    match sinks {
        ComptimeOption::Some(sinks) => {
            if exists {
                let sink = f32::cast_from(sinks[head as usize * sinks.stride(0)])
                    * comptime!(std::f32::consts::LOG2_E);
                let largest = select(sum == 0.0f32, sink, max(shift, sink));
                rescale = select(sum == 0.0f32, 0.0f32, exp2(shift - largest));
                let own = exp2(sink - largest);
                sum = select(sum == 0.0f32, own, sum * rescale + own);
                shift = largest;
            }
        }
        ComptimeOption::None => {}
    }
    let empty = sum == 0.0f32;
    Normalised {
        factor: select(empty, 0.0f32, rescale / sum),
        logsumexp: select(empty, negative_infinity, shift * ln_2 + sum.ln()),
    }
}

/// Writes a row's logsumexp.
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
        logsumexp[at] = row.logsumexp;
    }
}

/// Writes the first or the second of the thread's rows: `columns` columns from `first_column` on, as far as the
/// tensor's `value_dim` goes.
#[cube]
pub(crate) fn write_row<O: Float, N: Size, NO: Size>(
    o: Vector<f32, NO>,
    row: Normalised,
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
            let low = O::cast_from(o.extract(register) * row.factor);
            let high = O::cast_from(o.extract(comptime!(register + 1)) * row.factor);
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
