//! What a logit is worth: its place in their order, and its weight.
//!
//! Weights are whole multiples of 2⁻⁴⁰ of the likeliest token's, in 64 bits, so that their sums do not depend on how a row is divided.

use super::wide::Wide;
use cubecl::prelude::*;

/// The key of −∞. Keys of tokens that can be drawn are above it, as are none of NaN with a sign.
pub(super) const KEY_OF_NOTHING: u32 = 0x007F_FFFF;
/// The key of ∞. Above it are those of NaN without a sign.
const KEY_OF_INFINITY: u32 = 0xFF80_0000;
/// The key of 0; that of −0 is one below.
pub(super) const KEY_OF_ZERO: u32 = 0x8000_0000;
/// Powers of e below it are less than 2⁻⁴¹.
const LEAST_RATIO: f32 = -28.5;
/// 2⁸: the part of a weight in its upper word.
const UPPER: f32 = 256.0;
/// 2³².
const LOWER: f32 = 4_294_967_296.0;

/// A number in the order of `f32::total_cmp`; 0 where it is none above −∞.
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

/// How far a logit, or what its key is made of, is below the largest, by the temperature: the logarithm of its weight.
#[cube]
pub(super) fn ratio(key: u32, largest: u32, temperature: f32) -> f32 {
    // Apart, because ∞ - ∞ is NaN, and devices need not have ∞.
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

/// The number whose key it is.
#[cube]
fn number(key: u32) -> f32 {
    let bits = select(
        key >= comptime!(KEY_OF_ZERO),
        key - comptime!(KEY_OF_ZERO),
        !key,
    );
    f32::reinterpret(bits)
}

/// The weight of a [`ratio`].
#[cube]
pub(super) fn weight(ratio: f32) -> Wide {
    let counts = ratio >= f32::new(LEAST_RATIO);
    let weight = select(counts, ratio, 0.0f32).exp();
    let weight = select(counts, weight, 0.0f32);
    let upper = (weight * f32::new(UPPER)).floor();
    // What is left has fewer bits than a float, so that this rounds nothing up.
    let lower = (weight * f32::new(UPPER) - upper) * f32::new(LOWER);
    Wide {
        low: u32::cast_from(lower),
        high: u32::cast_from(upper),
    }
}
