//! Computes scores without the bias: scales the dot products and applies the softcap.

use super::pair_of;
use crate::math::score::{ScoreArguments, ScoreKind, widely_capped};
use cube_kit::nvidia::accumulator::Pair;
use cube_kit::nvidia::ptx::{exp2, fmin_nan, reciprocal};
use cubecl::prelude::*;

/// Turns two dot products `q·k` into scores, without the bias.
#[cube]
pub(crate) fn capped(dots: Pair, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> Pair {
    Pair {
        first: cap(dots.first, arguments, kind),
        second: cap(dots.second, arguments, kind),
    }
}

/// Turns a dot product `q·k` into a score, without the bias. The tanh of the softcap is computed from one exponential and
/// one reciprocal. The absolute error of this tanh is a few units in the last place of 1, less than the error of the
/// softmax's exponential.
#[cube]
fn cap(dot: f32, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> f32 {
    if comptime!(kind.softcap) {
        let below = reciprocal(exp2(dot * softcap_power(arguments)) + 1.0f32);
        if comptime!(kind.wide_softcap) {
            // Apply the factor 2 and the softcap one after the other, because `2 · softcap` may overflow to infinity.
            let far = fma(below, -2.0f32, 1.0f32) * arguments.softcap;
            widely_capped(dot * arguments.scale, far, arguments.softcap)
        } else {
            fma(below, -2.0f32 * arguments.softcap, arguments.softcap)
        }
    } else if comptime!(kind.adds_to_product()) {
        // In the forward and in the backward, the compiler fuses this multiplication by the scale with the addition of the
        // bias, or of the number that the score mod adds. Both passes therefore round the sum in the same way. The numbers
        // that ALiBi adds may differ between the passes by 2⁻²⁴ of their size.
        dot * arguments.scale
    } else {
        fma(dot, arguments.scale, 0.0f32)
    }
}

/// The largest finite f32.
const LARGEST: f32 = f32::MAX;

/// The factor that turns a dot product `q·k` into the exponent `2 · score / softcap`, in log2 units. The factor is clamped
/// to ±`f32::MAX`, because an infinite factor times a dot product of 0 would give NaN.
#[cube]
fn softcap_power(arguments: &ScoreArguments) -> f32 {
    let scale_log2 =
        comptime!(2.0 * std::f32::consts::LOG2_E) * arguments.scale / arguments.softcap;
    max(min(scale_log2, LARGEST), -LARGEST)
}

/// The upper limit of the exponent in the softcap's exponential, in log2 units. At this limit, `tanh` is already 1 in
/// f32. [`capped_together`] multiplies four such exponentials, whose product must have a normal reciprocal in f32.
const CAPPED: f32 = 31.0;

/// True if [`all_capped_together`] serves scores of this kind. Scores with a bias, a score mod or a mask mod may be
/// hidden in a fully visible block, and a hidden NaN must not spoil a visible score.
pub(crate) const fn caps_together(kind: ScoreKind) -> bool {
    kind.softcap
        && !kind.wide_softcap
        && !kind.bias
        && kind.score_mod.is_none()
        && kind.mask_mod.is_none()
}

/// Turns the dot products of a fully visible block into scores.
///
/// If one of four scores of a row is NaN, all four become NaN. The other NaNs do no harm. If the row is a query, one NaN
/// makes the row's softmax NaN. If the row is a key, one NaN makes the key's gradients NaN. With dropout, the gradient of
/// the values may be NaN where the NaN itself was dropped.
#[cube]
pub(crate) fn all_capped_together<NS: Size>(
    s: Vector<f32, NS>,
    arguments: &ScoreArguments,
    #[comptime] columns: usize,
) -> Vector<f32, NS> {
    comptime!(assert!(columns.is_multiple_of(16)));
    let mut s = s;
    // Registers of pairs `4i` and `4i + 2` belong to one row, and registers of the pairs behind these to another row.
    #[unroll]
    for two in 0..columns / 8 {
        let pair = comptime!(two / 2 * 4 + two % 2);
        let (near, far) = capped_together(
            pair_of::<NS>(s, pair),
            pair_of::<NS>(s, comptime!(pair + 2)),
            arguments,
        );
        s.insert(comptime!(2 * pair), near.first);
        s.insert(comptime!(2 * pair + 1), near.second);
        s.insert(comptime!(2 * pair + 4), far.first);
        s.insert(comptime!(2 * pair + 5), far.second);
    }
    s
}

/// Computes four capped scores with only one reciprocal. Each capped score needs `1 / a`, where `a` is 1 plus an
/// exponential of the score. With `r = 1 / (a · b)`, `1 / a = b · r` and `1 / b = a · r`, and `r` itself comes from the
/// reciprocal of a product of two products in the same way. The MUFU unit computes reciprocals and exponentials, and
/// limits the speed of the softcap.
#[cube]
fn capped_together(near: Pair, far: Pair, arguments: &ScoreArguments) -> (Pair, Pair) {
    let near = exponentials_plus_one(near, arguments);
    let far = exponentials_plus_one(far, arguments);
    let near_product = near.first * near.second;
    let far_product = far.first * far.second;
    let both = reciprocal(near_product * far_product);
    (
        capped_of(near, far_product * both, arguments),
        capped_of(far, near_product * both, arguments),
    )
}

/// Returns 1 plus the exponential of twice each score over the softcap.
#[cube]
fn exponentials_plus_one(dots: Pair, arguments: &ScoreArguments) -> Pair {
    let scale_log2 = softcap_power(arguments);
    Pair {
        first: exp2(fmin_nan(dots.first * scale_log2, CAPPED)) + 1.0f32,
        second: exp2(fmin_nan(dots.second * scale_log2, CAPPED)) + 1.0f32,
    }
}

/// Returns the capped scores for the results of [`exponentials_plus_one`], given the reciprocal of their product.
#[cube]
fn capped_of(exponentials: Pair, reciprocal: f32, arguments: &ScoreArguments) -> Pair {
    let slope = -2.0f32 * arguments.softcap;
    Pair {
        first: fma(exponentials.second * reciprocal, slope, arguments.softcap),
        second: fma(exponentials.first * reciprocal, slope, arguments.softcap),
    }
}
