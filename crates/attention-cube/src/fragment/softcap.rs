//! A fragment's scores without bias: scale and softcap.

use crate::math::score::{ScoreArguments, ScoreKind, widely_capped};
use cube_kit::hopper::accumulator::Pair;
use cube_kit::hopper::ptx::{exp2, reciprocal, smaller_or_none};
use cubecl::prelude::*;

/// The scores without bias.
#[cube]
pub(crate) fn capped(dots: Pair, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> Pair {
    Pair {
        first: cap(dots.first, arguments, kind),
        second: cap(dots.second, arguments, kind),
    }
}

/// The score without bias. The hyperbolic tangent by an exponential and a reciprocal: its absolute error is a
/// few units in the last place of 1, which the exponential of a score does not tell from the exact one.
#[cube]
fn cap(dot: f32, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> f32 {
    if comptime!(kind.softcap) {
        let below = reciprocal(exp2(dot * softcap_power(arguments)) + 1.0f32);
        if comptime!(kind.wide_softcap) {
            // Twice the softcap may be infinite.
            let far = fma(below, -2.0f32, 1.0f32) * arguments.softcap;
            widely_capped(dot * arguments.scale, far, arguments.softcap)
        } else {
            fma(below, -2.0f32 * arguments.softcap, arguments.softcap)
        }
    } else if comptime!(kind.bias) {
        // One fused operation with the bias, in the forward and in the backward.
        dot * arguments.scale
    } else {
        fma(dot, arguments.scale, 0.0f32)
    }
}

/// The largest number.
const LARGEST: f32 = f32::MAX;

/// `2 / c` of a scaled dot, in powers of two. Of a cap far below the scale it is the largest number: infinity times a dot of 0 would be none,
/// and all other dots are at the cap by either.
#[cube]
fn softcap_power(arguments: &ScoreArguments) -> f32 {
    let power = comptime!(2.0 * std::f32::consts::LOG2_E) * arguments.scale / arguments.softcap;
    max(min(power, LARGEST), -LARGEST)
}

/// From this power of two on, `tanh` is 1 in f32; twice of it is far from f32's largest.
const CAPPED: f32 = 60.0;

/// Two capped scores by one reciprocal, `1 / a = b · 1 / (a b)`, since the unit that makes reciprocals and exponentials bounds
/// the softcap. If one is no number, both become none.
#[cube]
pub(crate) fn capped_together(dots: Pair, arguments: &ScoreArguments) -> Pair {
    let power = softcap_power(arguments);
    let first = exp2(smaller_or_none(dots.first * power, CAPPED)) + 1.0f32;
    let second = exp2(smaller_or_none(dots.second * power, CAPPED)) + 1.0f32;
    let both = reciprocal(first * second);
    let slope = -2.0f32 * arguments.softcap;
    Pair {
        first: fma(second * both, slope, arguments.softcap),
        second: fma(first * both, slope, arguments.softcap),
    }
}
