//! The online softmax of a fragment's scores (Milakov and Gimelshein, <https://arxiv.org/abs/1805.02867>).
//!
//! The softmax subtracts a *reference* from each score: the maximum of the row's scores up to some earlier block. The
//! references of a warp are updated only if a score exceeds its row's reference by more than 8 in log2 units. O is therefore
//! seldom rescaled, as in FlashAttention-4. The elements of P are at most 2^8, far below the limit of half precision.

use cube_kit::nvidia::accumulator::{Pair, is_second, pair};
use cube_kit::nvidia::ptx::exp2;
use cubecl::prelude::*;

/// Returns the maximum of `least` and the thread's scores, for each of the thread's two rows. The fragment has `columns`
/// columns.
#[cube]
pub(crate) fn thread_row_max<NS: Size>(
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

/// Returns the maximum of each row over the four threads that share the row.
#[cube]
pub(crate) fn quad_max(own: Pair) -> Pair {
    let mut first = own.first;
    let mut second = own.second;
    first = max(first, plane_shuffle_xor(first, 1u32));
    second = max(second, plane_shuffle_xor(second, 1u32));
    first = max(first, plane_shuffle_xor(first, 2u32));
    second = max(second, plane_shuffle_xor(second, 2u32));
    Pair { first, second }
}

/// Returns the sum of each row over the four threads that share the row.
#[cube]
pub(crate) fn quad_sum(sums: Pair) -> Pair {
    let mut first = sums.first;
    let mut second = sums.second;
    first += plane_shuffle_xor(first, 1u32);
    second += plane_shuffle_xor(second, 1u32);
    first += plane_shuffle_xor(first, 2u32);
    second += plane_shuffle_xor(second, 2u32);
    Pair { first, second }
}

/// The largest difference between a row's maximum so far and the row's *reference*, in log2 units. The softmax
/// subtracts the reference, an earlier row maximum, from the scores. Beyond this difference, the row's maximum becomes
/// the new reference.
const RESCALE_THRESHOLD: f32 = 8.0;

/// The references of a thread's two rows, which the softmax subtracts from the scores.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowMax {
    /// The reference of each row: the row's maximum so far, or a value at most [`RESCALE_THRESHOLD`] log2 units below
    /// this maximum.
    pub reference: Pair,
    /// The references in log2 units, which the exponential subtracts from the scaled scores. If `far` is true, both
    /// numbers are 0, because the softmax has already subtracted the references from the unscaled scores.
    pub shift: Pair,
    /// True if a reference of the warp exceeds [`FAR`] in magnitude, in log2 units. The softmax then subtracts the references
    /// from the scores before it applies the scale.
    pub far: bool,
}

/// The scores of a block, the references that the exponential subtracts from these scores, and the rescale factor. The
/// factor rescales row_sum and O of earlier blocks.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Rescaled<NS: Size> {
    pub s: Vector<f32, NS>,
    pub row_max: RowMax,
    /// True if this block changed the reference (the row maximum that the softmax subtracts) of one of the warp's rows.
    pub moved: bool,
    /// The factor that rescales row_sum and O of earlier blocks, or 1 if the reference is unchanged.
    pub factor: Pair,
}

/// Updates the references, the values that the softmax subtracts from the scores. A reference is an earlier maximum of
/// its row. It may be below the current maximum by up to [`RESCALE_THRESHOLD`]. If a score of the warp exceeds its
/// row's reference by more than [`RESCALE_THRESHOLD`], the references of all the warp's rows are updated. Each
/// reference then becomes the maximum of its row.
///
/// If a reference exceeds [`FAR`] in magnitude, the references are updated after each block of keys instead. In this
/// case, the softmax subtracts the references before it applies the scale, not after.
///
/// For each of the thread's two rows, `largest` is the maximum of the earlier reference and of the thread's scores. If
/// `agreed`, `largest` already covers the scores of all threads that share the row. `scale_log2` is the factor from
/// scores to log2 units.
#[cube]
pub(crate) fn rescaled<NS: Size>(
    s: Vector<f32, NS>,
    largest: Pair,
    row_max: RowMax,
    scale_log2: f32,
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
    let margin = RESCALE_THRESHOLD / scale_log2;
    // Before the first visible score, both sides of each comparison are −∞, so each comparison is false.
    let needs_rescale =
        largest.first > reference_0 + margin || largest.second > reference_1 + margin;
    let moved = plane_any(far || needs_rescale);
    if moved {
        let largest = if comptime!(agreed) {
            largest
        } else {
            quad_max(largest)
        };
        let first = finite(largest.first, negative_infinity);
        let second = finite(largest.second, negative_infinity);
        factor_0 = exp2((reference_0 - first) * scale_log2);
        factor_1 = exp2((reference_1 - second) * scale_log2);
        reference_0 = largest.first;
        reference_1 = largest.second;
        shift_0 = first * scale_log2;
        shift_1 = second * scale_log2;
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

/// The state of the online softmax for a thread's two rows, after the blocks processed so far.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct SoftmaxState {
    pub row_max: RowMax,
    /// True if O must still be multiplied by `factor`. The row sums in `sums` are already rescaled.
    pub moved: bool,
    pub factor: Pair,
    pub sums: Pair,
}

/// Returns the state of the online softmax before the first block.
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

/// Returns the state of the online softmax after a block. `before` holds each row's row_sum before the block, and `added`
/// the sum of the block's exponentials.
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

/// Returns `reference`. If `reference` is −∞ because the row has seen no key, returns 0 instead.
#[cube]
pub(crate) fn finite(reference: f32, negative_infinity: f32) -> f32 {
    select(reference == negative_infinity, 0.0f32, reference)
}

/// The largest magnitude of a reference, in log2 units, for which the softmax scales the scores before it subtracts the
/// reference. The reference is the row maximum that the softmax subtracts from the scores. For a larger reference, f32
/// is too coarse: the exponential of the row's largest score would not be 1.
const FAR: f32 = 2048.0;

/// The exponentials of 8 scores of a thread, and the sum of these exponentials for each of the thread's two rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ExpScores {
    pub values: Vector<f32, Const<8>>,
    pub sums: Pair,
    /// A bit mask of the columns that the thread holds. A bit is 1 if the exponential is positive in at least one of
    /// the thread's two rows. If the caller did not request the bit mask, the field is 0.
    pub used: u32,
}

/// Computes the exponentials of the thread's scores in columns `16 · step` to `16 · step + 15`. `shift` holds the
/// references in log2 units (see [`RowMax`]). If `uses`, the result includes a bit mask of the columns with a positive
/// exponential.
#[cube]
pub(crate) fn exp_scores<NS: Size>(
    s: Vector<f32, NS>,
    shift: Pair,
    scale_log2: f32,
    #[comptime] step: usize,
    #[comptime] uses: bool,
) -> ExpScores {
    let e_0 = exp2(fma(s.extract(8 * step), scale_log2, -shift.first));
    let e_1 = exp2(fma(s.extract(8 * step + 1), scale_log2, -shift.first));
    let e_2 = exp2(fma(s.extract(8 * step + 2), scale_log2, -shift.second));
    let e_3 = exp2(fma(s.extract(8 * step + 3), scale_log2, -shift.second));
    let e_4 = exp2(fma(s.extract(8 * step + 4), scale_log2, -shift.first));
    let e_5 = exp2(fma(s.extract(8 * step + 5), scale_log2, -shift.first));
    let e_6 = exp2(fma(s.extract(8 * step + 6), scale_log2, -shift.second));
    let e_7 = exp2(fma(s.extract(8 * step + 7), scale_log2, -shift.second));
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
    ExpScores {
        values,
        sums: Pair {
            first: (e_0 + e_1) + (e_4 + e_5),
            second: (e_2 + e_3) + (e_6 + e_7),
        },
        used,
    }
}

/// Returns `1 << bit` if one of the two exponentials is positive, else 0. An exponential that is NaN, as in a row past
/// the end, does not set the bit.
#[cube]
fn used_bit(first: f32, second: f32, #[comptime] bit: u32) -> u32 {
    select(
        first > 0.0f32 || second > 0.0f32,
        comptime!(1u32 << bit),
        0u32,
    )
}

/// If `moved`, multiplies each row of O by the row's rescale factor. `moved` is true if the references (the row maxima
/// that the softmax subtracts) have changed. O has `columns` columns.
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
