//! The random generator of dropout inside kernels.

use super::{MULTIPLIER, ROUNDS, WEYL};
use cubecl::prelude::*;

/// The runtime parameters of dropout.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct DropoutArguments {
    pub seed_low: u32,
    pub seed_high: u32,
    /// The threshold of dropout. A probability is dropped if the random bits of its score are below this threshold.
    pub threshold: u32,
    /// The factor by which kept probabilities are multiplied.
    pub kept: f32,
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

/// Draws the 64 random bits of the cell that contains the score of `query` and `key`. The first word belongs to the cell's
/// first key, and the second word to the key eight positions later. In each word, the low half belongs to the cell's first
/// query.
#[cube]
pub(crate) fn cell(head_key: u32, query: u32, key: u32) -> Drawn {
    philox(cell_index(query), cell_index(key), head_key)
}

/// Returns the index of a position's cell along the position's dimension. Positions `p` and `p + 8` with `p % 16 < 8` have the
/// same index.
#[cube]
fn cell_index(position: u32) -> u32 {
    position / 16u32 * 8u32 + position % 8u32
}

/// Returns the factor that must multiply sums over kept probabilities, or 1 without dropout.
#[cube]
pub(crate) fn kept_scale(dropout: &ComptimeOption<DropoutArguments>) -> f32 {
    #[comptime]
    match dropout {
        ComptimeOption::Some(dropout) => dropout.kept,
        ComptimeOption::None => f32::new(1.0),
    }
}

/// Returns the keep factor of the probability of `query` and `key`. The factor is 0 if the probability is dropped, and `kept`
/// otherwise.
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
            let word = select(key / 8u32 % 2u32 == 1u32, drawn.second, drawn.first);
            let bits = word >> (query / 8u32 % 2u32 * 16u32) & 0xffffu32;
            select(bits < dropout.threshold, 0.0f32, dropout.kept)
        }
        ComptimeOption::None => f32::new(1.0),
    }
}
