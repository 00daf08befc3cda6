//! Computes scores without the bias: scales the dot products and applies the softcap.

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
/// f32. `capped_together` multiplies two such exponentials. At this limit, the product of the two is below the largest
/// f32.
const CAPPED: f32 = 60.0;

/// Computes two capped scores with only one reciprocal. The first capped score needs `1 / a`, where `a` is 1 plus an
/// exponential of the first score. The second capped score needs `1 / b`, where `b` is 1 plus the exponential of the
/// second score. With `r = 1 / (a · b)`, `1 / a = b · r` and `1 / b = a · r`. The MUFU unit computes reciprocals and
/// exponentials, and limits the speed of the softcap. One reciprocal less therefore saves time. If one of the scores is
/// NaN, both scores become NaN.
#[cube]
pub(crate) fn capped_together(dots: Pair, arguments: &ScoreArguments) -> Pair {
    let scale_log2 = softcap_power(arguments);
    let first = exp2(fmin_nan(dots.first * scale_log2, CAPPED)) + 1.0f32;
    let second = exp2(fmin_nan(dots.second * scale_log2, CAPPED)) + 1.0f32;
    let both = reciprocal(first * second);
    let slope = -2.0f32 * arguments.softcap;
    Pair {
        first: fma(second * both, slope, arguments.softcap),
        second: fma(first * both, slope, arguments.softcap),
    }
}
