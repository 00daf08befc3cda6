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
    /// True if dropout keeps the probabilities of hits (scores whose random bits are above the threshold) and drops all
    /// others.
    #[cube(comptime)]
    pub keeps_hits: bool,
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
    let mut words = Vector::<u32, Const<2>>::zeroed();
    words.insert(0usize, first);
    words.insert(1usize, second);
    let words = draw_together::<Const<2>>(words, key, 1usize, 2usize);
    Drawn {
        first: words.extract(0usize),
        second: words.extract(1usize),
    }
}

/// Runs the generator for `count` counters of two words, and returns two random words for each. Counter `i` lies in the
/// elements `i · step` and `i · step + 1` of `words`, and the random words take its place.
///
/// The multiplications of one counter depend on each other. The kernel therefore runs each round for all counters, so
/// that a multiplication does not wait for the one before.
#[cube]
pub(crate) fn draw_together<W: Size>(
    words: Vector<u32, W>,
    key: u32,
    #[comptime] count: usize,
    #[comptime] step: usize,
) -> Vector<u32, W> {
    let mut words = words;
    let mut key = key;
    #[unroll]
    for _round in 0..ROUNDS {
        #[unroll]
        for counter in 0..count {
            let first = words.extract(comptime!(counter * step));
            let second = words.extract(comptime!(counter * step + 1));
            let high = first.mul_hi(MULTIPLIER.runtime());
            words.insert(comptime!(counter * step), high ^ key ^ second);
            words.insert(comptime!(counter * step + 1), first * comptime!(MULTIPLIER));
        }
        key += comptime!(WEYL);
    }
    words
}

/// Returns the generator key of a query head.
#[cube]
pub(crate) fn head_key(dropout: &DropoutArguments, batch: u32, head: u32) -> u32 {
    let plane = batch * dropout.q_heads + head;
    philox(plane, dropout.seed_high, dropout.seed_low).first
}

/// Draws the 64 random bits of the cell (eight scores of two queries and four keys) that contains the score of `query`
/// and `key`. The first word is for the first query, and the second word for the second query. The low half of each
/// word is for the two even keys, and the high half for the two odd keys. A half holds the random bits of the score
/// with the smaller key. [`bits_of_later_keys`] returns those of the larger key.
#[cube]
pub(crate) fn cell(head_key: u32, query: u32, key: u32) -> Drawn {
    let counter = counter(query, key);
    philox(counter.0, counter.1, head_key)
}

/// Returns the counter of the cell that contains the score of `query` and `key`. See [`cell`].
#[cube]
pub(crate) fn counter(query: u32, key: u32) -> (u32, u32) {
    let query_cell = query / 16u32 * 8u32 + query % 8u32;
    let key_cell = key / 16u32 * 4u32 + key % 8u32 / 2u32;
    (query_cell, key_cell)
}

/// The mask that selects the high byte of each half of a word.
const HIGH_BYTES: u32 = 0xFF00_FF00;

/// Returns the random bits of the two scores of a cell whose keys are 8 positions after those of `own`. `own` is the
/// word of their query, and `other` the second word of the cell. In each half of the result, the high byte is the low
/// byte of `own`, and the low byte is the high byte of `other`.
#[cube]
fn bits_of_later_keys(own: u32, other: u32) -> u32 {
    (own & comptime!(!HIGH_BYTES)) << 8u32 | (other & comptime!(HIGH_BYTES)) >> 8u32
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
                own = bits_of_later_keys(own, other);
            }
            let bits = own >> (key % 2u32 * 16u32) & 0xFFFFu32;
            let is_hit = is_hit(bits, dropout.thresholds & 0xFFFFu32);
            let is_kept = if comptime!(dropout.keeps_hits) {
                is_hit
            } else {
                !is_hit
            };
            select(is_kept, dropout.kept, 0.0f32)
        }
        ComptimeOption::None => f32::new(1.0),
    }
}
