//! The sort key and the weight of a logit. The sort key is an integer that compares as the logit does, and the weight
//! is an unnormalized probability.
//!
//! Weights are integer multiples of 2⁻⁴⁰ of the most likely token's weight, in 64 bits. The sums of weights do not
//! depend on the order of the additions.

use super::wide::Wide;
use cubecl::prelude::*;

/// The sort key that −∞ would have in the order of `f32::total_cmp`. Tokens that can be drawn have larger sort keys.
/// For −∞ and for every NaN, the function `key` returns 0 instead.
pub(super) const KEY_OF_NOTHING: u32 = 0x007F_FFFF;
/// The sort key of ∞. Larger integers would stand for NaN.
const KEY_OF_INFINITY: u32 = 0xFF80_0000;
/// The sort key of a logit of 0. The sort key of −0 is smaller by 1.
pub(super) const KEY_OF_ZERO: u32 = 0x8000_0000;
/// A weight counts as zero if its natural logarithm is smaller than this number. Such a weight is below 2⁻⁴¹.
const LEAST_RATIO: f32 = -28.5;
/// The factor 2⁸. The upper 32-bit word of a weight is the integer part of 2⁸ times the weight, because weights are
/// stored in units of 2⁻⁴⁰. The real weight is at most 1.
const UPPER: f32 = 256.0;
/// The factor 2³². The lower 32-bit word of a weight is the integer part of 2³² times the fraction that remains after
/// the upper word.
const LOWER: f32 = 4_294_967_296.0;

/// Maps a logit to its sort key. The order of sort keys is the order of their logits by `f32::total_cmp`. NaN and −∞
/// give 0.
#[cube]
pub(super) fn key(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let key = select(
        bits < comptime!(KEY_OF_ZERO),
        bits | comptime!(KEY_OF_ZERO),
        !bits,
    );
    let possible = key > comptime!(KEY_OF_NOTHING) && key <= comptime!(KEY_OF_INFINITY);
    select(possible, key, 0u32)
}

/// Returns the natural logarithm of a weight: the logit minus the largest logit, divided by the temperature. `key` and
/// `largest` are the sort keys of these two logits.
#[cube]
pub(super) fn ratio(key: u32, largest: u32, temperature: f32) -> f32 {
    // Handle infinite logits separately, because ∞ − ∞ is NaN, and some devices have no ∞.
    let is_largest = key == largest;
    let infinite = largest == comptime!(KEY_OF_INFINITY);
    let apart = is_largest || infinite;
    let below = number(select(apart, comptime!(KEY_OF_ZERO), key))
        - number(select(apart, comptime!(KEY_OF_ZERO), largest));
    select(
        !is_largest && infinite,
        f32::new(f32::MIN),
        below / temperature,
    )
}

/// Returns the float that has this sort key.
#[cube]
fn number(key: u32) -> f32 {
    let bits = select(
        key >= comptime!(KEY_OF_ZERO),
        key - comptime!(KEY_OF_ZERO),
        !key,
    );
    f32::reinterpret(bits)
}

/// Returns the weight whose natural logarithm is `ratio`, the result of the function [`ratio`].
#[cube]
pub(super) fn weight(ratio: f32) -> Wide {
    let counts = ratio >= f32::new(LEAST_RATIO);
    let weight = select(counts, ratio, 0.0f32).exp();
    let weight = select(counts, weight, 0.0f32);
    let upper = (weight * f32::new(UPPER)).floor();
    // The subtraction is exact, because it only removes the integer part. The multiplications are exact, because their
    // factors are powers of two.
    let lower = (weight * f32::new(UPPER) - upper) * f32::new(LOWER);
    Wide {
        low: u32::cast_from(lower),
        high: u32::cast_from(upper),
    }
}
