//! The online softmax of a fragment's scores (Milakov and Gimelshein, <https://arxiv.org/abs/1805.02867>).
//!
//! The running reference of a row is a former maximum: it moves only when a row of the warp has outgrown it
//! by 2^8, so that the output is seldom rescaled (FlashAttention-4 does likewise). P stays below 2^8 and the
//! sum below 2^8 times the number of keys, far from the limits of half precision and f32.

use cube_kit::hopper::accumulator::{Pair, is_second, pair};
use cube_kit::hopper::ptx::exp2;
use cubecl::prelude::*;

/// The largest scores of the thread's rows among its own of `columns`, but not below `least`.
#[cube]
pub(crate) fn own_maxima<NS: Size>(
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
    Pair { first, second }
}

/// The largest of the threads that share the rows.
#[cube]
pub(crate) fn maxima(own: Pair) -> Pair {
    let mut first = own.first;
    let mut second = own.second;
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

/// A reference may fall behind the maximum by this power of two.
const RESCALE_THRESHOLD: f32 = 8.0;

/// What the scores of a thread's rows are measured from.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowMax {
    /// The rows' references: the largest scores so far, or up to [`RESCALE_THRESHOLD`] powers of two below these.
    pub reference: Pair,
    /// The references in powers of two, to be taken from the scores'; 0 where they are far.
    pub shift: Pair,
    /// Whether some reference of the warp is [`FAR`], so that scores lose theirs before the scale.
    pub far: bool,
}

/// A block's scores as they are to be measured, from where, and what becomes of older results.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Rescaled<NS: Size> {
    pub s: Vector<f32, NS>,
    pub row_max: RowMax,
    /// Whether the references of the warp's rows moved.
    pub moved: bool,
    /// What brings older results to them: 1 where they did not.
    pub factor: Pair,
}

/// Lets the references of all rows of the warp follow to their maxima where some row has outgrown its own. `largest` is at
/// least what the thread has: only those that follow ask the threads that share their rows, unless they are `agreed`.
/// `power` is the factor from scores to powers of two.
#[cube]
pub(crate) fn rescaled<NS: Size>(
    s: Vector<f32, NS>,
    largest: Pair,
    row_max: RowMax,
    power: f32,
    negative_infinity: f32,
    #[comptime] agreed: bool,
    #[comptime] columns: usize,
) -> Rescaled<NS> {
    let mut s = s;
    let mut reference_0 = row_max.reference.first;
    let mut reference_1 = row_max.reference.second;
    let mut shift_0 = row_max.shift.first;
    let mut shift_1 = row_max.shift.second;
    let mut far = row_max.far;
    let mut factor_0 = f32::new(1.0);
    let mut factor_1 = f32::new(1.0);
    let margin = RESCALE_THRESHOLD / power;
    // Without a score yet both sides are −∞, and none is greater.
    let needs_rescale =
        largest.first > reference_0 + margin || largest.second > reference_1 + margin;
    let moved = plane_any(far || needs_rescale);
    if moved {
        let largest = if comptime!(agreed) {
            largest
        } else {
            maxima(largest)
        };
        let first = finite(largest.first, negative_infinity);
        let second = finite(largest.second, negative_infinity);
        factor_0 = exp2((reference_0 - first) * power);
        factor_1 = exp2((reference_1 - second) * power);
        reference_0 = largest.first;
        reference_1 = largest.second;
        shift_0 = first * power;
        shift_1 = second * power;
        far = plane_any(max(shift_0.abs(), shift_1.abs()) > FAR);
        if far {
            shift_0 = 0.0f32;
            shift_1 = 0.0f32;
            #[unroll]
            for i in 0..columns / 2 {
                let own = if comptime!(is_second(i)) {
                    second
                } else {
                    first
                };
                s.insert(i, s.extract(i) - own);
            }
        }
    }
    Rescaled::<NS> {
        s,
        row_max: RowMax {
            reference: Pair {
                first: reference_0,
                second: reference_1,
            },
            shift: Pair {
                first: shift_0,
                second: shift_1,
            },
            far,
        },
        moved,
        factor: Pair {
            first: factor_0,
            second: factor_1,
        },
    }
}

/// What the blocks so far have made of a thread's rows.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct SoftmaxState {
    pub row_max: RowMax,
    /// Whether older outputs are to be multiplied by the factors; the sums are already.
    pub moved: bool,
    pub factor: Pair,
    pub sums: Pair,
}

/// Of rows that have seen nothing.
#[cube]
pub(crate) fn empty_state(negative_infinity: f32) -> SoftmaxState {
    SoftmaxState {
        row_max: RowMax {
            reference: pair(negative_infinity, negative_infinity),
            shift: pair(0.0f32, 0.0f32),
            far: false.runtime(),
        },
        sums: pair(0.0f32, 0.0f32),
        moved: false.runtime(),
        factor: pair(1.0f32, 1.0f32),
    }
}

/// After a block that was `rescaled` and whose numerators' sums are `added` to those before it.
#[cube]
pub(crate) fn softmax_state<NS: Size>(
    rescaled: Rescaled<NS>,
    before: Pair,
    added: Pair,
) -> SoftmaxState {
    SoftmaxState {
        row_max: rescaled.row_max,
        sums: Pair {
            first: before.first * rescaled.factor.first + added.first,
            second: before.second * rescaled.factor.second + added.second,
        },
        moved: rescaled.moved,
        factor: rescaled.factor,
    }
}

/// The reference, or 0 for a row that has seen nothing.
#[cube]
pub(crate) fn finite(reference: f32, negative_infinity: f32) -> f32 {
    select(reference == negative_infinity, 0.0f32, reference)
}

/// References, in powers of two, that f32 no longer holds finely enough to be subtracted after the scale: the power of two of
/// the largest score would not be 1.
const FAR: f32 = 2048.0;

/// The numerators of a thread's 8 registers, and what they add to the sums.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Numerators {
    pub values: Vector<f32, Const<8>>,
    pub sums: Pair,
    /// A bit for each of the thread's columns that some row of its sees, where that is asked for.
    pub used: u32,
}

/// Of 16 columns from the `step`-th on. `shift` is the reference in powers of two.
#[cube]
pub(crate) fn numerators<NS: Size>(
    s: Vector<f32, NS>,
    shift: Pair,
    power: f32,
    #[comptime] step: usize,
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
    let mut values = Vector::<f32, Const<8>>::zeroed();
    values.insert(0usize, e_0);
    values.insert(1usize, e_1);
    values.insert(2usize, e_2);
    values.insert(3usize, e_3);
    values.insert(4usize, e_4);
    values.insert(5usize, e_5);
    values.insert(6usize, e_6);
    values.insert(7usize, e_7);
    Numerators {
        values,
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

/// Multiplies `columns` columns of O, where the references of the warp's rows `moved`.
#[cube]
pub(crate) fn rescale<NO: Size>(
    o: Vector<f32, NO>,
    moved: bool,
    factor: Pair,
    #[comptime] columns: usize,
) -> Vector<f32, NO> {
    let mut o = o;
    if moved {
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
