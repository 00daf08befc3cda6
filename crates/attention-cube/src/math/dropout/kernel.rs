//! The random generator of dropout inside kernels.

use super::{INFINITY, MULTIPLIER, ROUNDS, WEYL};
use cubecl::prelude::*;

/// The runtime parameters of dropout.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct DropoutArguments {
    pub seed_low: u32,
    pub seed_high: u32,
    /// A word that holds the 16 bits of the [`Threshold`](super::Threshold) twice, once in each half.
    pub thresholds: u32,
    /// A word that tells how dropout treats hits (scores whose random bits are above the threshold). If dropout drops
    /// the probabilities of hits, all bits of the word are 1. If dropout keeps them, all bits are 0.
    pub drops_hits: u32,
    /// The factor by which kernels multiply kept probabilities.
    pub kept: f32,
    /// The factor `-1 / kept`. Some kernels multiply the gradients by `kept` only at the end. Such a kernel multiplies
    /// delta by this factor.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "only kernels for tensor cores read it")
    )]
    pub minus_inverse_kept: f32,
    /// The number of query heads per sequence.
    pub q_heads: u32,
}

/// The two random 32-bit words that one call of the generator returns.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Drawn {
    pub first: u32,
    pub second: u32,
}

/// Runs the generator for a counter of two words, and returns two random words.
#[cube]
fn philox(first: u32, second: u32, key: u32) -> Drawn {
    let mut first = first;
    let mut second = second;
    let mut key = key;
    #[unroll]
    for _round in 0..ROUNDS {
        let high = first.mul_hi(MULTIPLIER.runtime());
        let low = first * comptime!(MULTIPLIER);
        first = high ^ key ^ second;
        second = low;
        key += comptime!(WEYL);
    }
    Drawn { first, second }
}

/// Returns the generator key of a query head.
#[cube]
pub(crate) fn head_key(dropout: &DropoutArguments, batch: u32, head: u32) -> u32 {
    let plane = batch * dropout.q_heads + head;
    philox(plane, dropout.seed_high, dropout.seed_low).first
}

/// Draws the 64 random bits of the cell (eight scores of two queries and four keys) that contains the score of `query`
/// and `key`. The first word is for the first query, and the second word for the second query. The low half of each
/// word is for the two even keys, and the high half for the two odd keys. In each half, the high byte is for the
/// smaller of the two keys.
#[cube]
pub(crate) fn cell(head_key: u32, query: u32, key: u32) -> Drawn {
    let query_cell = query / 16u32 * 8u32 + query % 8u32;
    let key_cell = key / 16u32 * 4u32 + key % 8u32 / 2u32;
    philox(query_cell, key_cell, head_key)
}

/// The mask that selects the high byte of each half of a word.
const OWN_BYTES: u32 = 0xFF00_FF00;

/// Returns the random bits of two scores. Each half of the result holds the 16 random bits of one score. The high byte
/// of a half comes from `own`. The low byte is the exclusive or of the low bytes that `own` and `other` have in this
/// half.
#[cube]
pub(crate) fn random_bits_of_pair(own: u32, other: u32) -> u32 {
    own & comptime!(OWN_BYTES) | (own ^ other) & comptime!(!OWN_BYTES)
}

/// Exchanges the two bytes within each 16-bit half of a word.
#[cube]
pub(crate) fn exchanged_bytes(word: u32) -> u32 {
    (word & comptime!(OWN_BYTES)) >> 8u32 | (word & comptime!(!OWN_BYTES)) << 8u32
}

/// True if `bits` (the 16 random bits of a score) is above `threshold`. Both are read as f16 numbers.
#[cube]
fn is_hit(bits: u32, threshold: u32) -> bool {
    bits & 0x7FFFu32 <= comptime!(INFINITY) && number(bits) > number(threshold)
}

/// Converts the bits of an f16 number to an integer. The order of these integers is the order of the f16 numbers.
#[cube]
fn number(bits: u32) -> i32 {
    let magnitude = (bits & 0x7FFFu32) as i32;
    select(bits & 0x8000u32 == 0u32, magnitude, -magnitude)
}

/// Returns the factor by which kernels must multiply sums over kept probabilities. Without dropout, the factor is 1.
#[cube]
pub(crate) fn kept_scale(dropout: &ComptimeOption<DropoutArguments>) -> f32 {
    #[comptime]
    match dropout {
        ComptimeOption::Some(dropout) => dropout.kept,
        ComptimeOption::None => f32::new(1.0),
    }
}

/// Returns the factor by which dropout multiplies the probability of `query` and `key`. If dropout drops the
/// probability, the factor is 0. Otherwise it is the field `kept` of `dropout`.
#[cube]
pub(crate) fn keep_factor(
    dropout: &ComptimeOption<DropoutArguments>,
    batch: u32,
    head: u32,
    query: u32,
    key: u32,
) -> f32 {
    #[comptime]
    match dropout {
        ComptimeOption::Some(dropout) => {
            let drawn = cell(head_key(dropout, batch, head), query, key);
            let is_second = query / 8u32 % 2u32 == 1u32;
            let mut own = select(is_second, drawn.second, drawn.first);
            let other = select(is_second, drawn.first, drawn.second);
            if key / 8u32 % 2u32 == 1u32 {
                own = exchanged_bytes(own);
            }
            let bits = random_bits_of_pair(own, other) >> (key % 2u32 * 16u32) & 0xFFFFu32;
            let is_hit = is_hit(bits, dropout.thresholds & 0xFFFFu32);
            select(
                is_hit && dropout.drops_hits != 0u32 || !is_hit && dropout.drops_hits == 0u32,
                0.0f32,
                dropout.kept,
            )
        }
        ComptimeOption::None => f32::new(1.0),
    }
}
