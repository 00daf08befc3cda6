//! The draw: what is kept of each stretch, then the stretch and the token where the sum of weights, in the tokens' order, passes a
//! random number.
//!
//! Budget: 5 KB of shared memory. Bound by latency: the first launch reads the logits once, a cube a stretch; the second, a cube a row,
//! reads what all stretches have at once, and one stretch twice.

use super::{
    random::bits,
    search::Target,
    search::{
        AHEAD, Cuts, Limits, MOST_STRETCHES, after_top_k, descend, largest_of, next_keys, stretch,
    },
    weight::{key, ratio, weight},
    wide::{UNITS, Wide, cube_sums},
};
use cube_kit::overlap::{take_turn, was_written, was_written_if_there};
use cubecl::prelude::*;

/// Words of what is kept of a stretch: the weights of tokens above the threshold, how many tie with it, the threshold, and the weight
/// that those that tie have still to give.
pub(super) const SUMMARY: usize = 6;
/// Bits of a number of columns.
pub(super) const COLUMN_BITS: u32 = 22;

/// What is kept of a row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Kept {
    largest: u32,
    /// The least key that is kept.
    threshold: u32,
    /// Whether only some of the tokens that tie with it are.
    #[cube(comptime)]
    top_p: bool,
}

#[cube]
impl Kept {
    /// The weight of a key that is kept whatever ties.
    pub fn above(&self, key: u32, limits: Limits) -> Wide {
        let mut is_above = key >= self.threshold;
        if comptime!(self.top_p) {
            is_above = key > self.threshold;
        }
        let own = self.weight(key, limits);
        Wide {
            low: select(is_above, own.low, 0u32),
            high: select(is_above, own.high, 0u32),
        }
    }

    /// 1 for a key that ties.
    pub fn tie(&self, key: u32) -> u32 {
        if comptime!(self.top_p) {
            select(key == self.threshold, 1u32, 0u32)
        } else {
            0u32.runtime()
        }
    }

    /// The weight of a key that min-p leaves.
    pub fn weight(&self, key: u32, limits: Limits) -> Wide {
        let ratio = ratio(key, self.largest, limits.temperature);
        let own = weight(ratio);
        let likely = ratio >= limits.least;
        Wide {
            low: select(likely, own.low, 0u32),
            high: select(likely, own.high, 0u32),
        }
    }
}

/// Adds up what is kept of each stretch.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn keep_overlapped<E: Float>(
    logits: &Tensor<E>,
    largest: &Tensor<u32>,
    before: ComptimeOption<&Tensor<u32>>,
    summaries: &mut Tensor<u32>,
    limits: Limits,
    rows: u32,
    columns: u32,
    stretches: u32,
    #[comptime] cuts: Cuts,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
) {
    take_turn(overlaps);
    was_written(logits, overlaps);
    was_written(largest, overlaps);
    was_written_if_there(before, overlaps);
    let stretch = stretch(columns, stretches);
    if stretch.row >= rows {
        terminate!();
    }
    let mut sums = Shared::<[u32]>::new_slice(comptime!(2 * UNITS));
    // The threshold is what top-p's search has found, or where top-k's has put the floor.
    let found = if comptime!(cuts.top_p) {
        let records = before.unwrap();
        descend(
            records,
            stretch,
            stretches,
            limits,
            &mut sums,
            3u32,
            Target::Rest,
        )
    } else {
        after_top_k(before, stretch, stretches, limits, &mut sums)
    };
    let threshold = if comptime!(cuts.top_p) {
        found.prefix
    } else {
        found.floor
    };
    let kept = Kept {
        largest: largest_of(largest, stretch.row, stretches),
        threshold,
        top_p: comptime!(cuts.top_p),
    };

    let from = stretch.row as usize * columns as usize;
    let mut low = 0u32;
    let mut high = 0u32;
    let mut ties = 0u32;
    let mut column = stretch.start + UNIT_POS;
    while column < stretch.end {
        let keys = next_keys(logits, from, column, stretch.end);
        #[unroll]
        for ahead in 0..AHEAD {
            let sum = Wide { low, high }.plus(kept.above(keys[ahead], limits));
            low = sum.low;
            high = sum.high;
            ties += kept.tie(keys[ahead]);
        }
        column += comptime!((AHEAD * UNITS) as u32);
    }
    let sum = cube_sums(Wide { low, high }, &mut sums).all;
    let ties = cube_sums(Wide::of(ties), &mut sums).all;
    if UNIT_POS == 0 {
        let at = CUBE_POS * comptime!(SUMMARY);
        summaries[at] = sum.low;
        summaries[at + 1] = sum.high;
        summaries[at + 2] = ties.low;
        summaries[at + 3] = threshold;
        summaries[at + 4] = found.need.low;
        summaries[at + 5] = found.need.high;
    }
}

/// How many numbers of a weight it takes to give what is needed: the first, and every one before which there was too little.
#[cube]
fn ties_that_give(need: Wide, weight: Wide) -> u32 {
    let mut last = 0u32;
    let mut bit = comptime!(1u32 << (COLUMN_BITS - 1)).runtime();
    while bit > 0u32 {
        if weight.times(last + bit).is_below(need) {
            last += bit;
        }
        bit /= 2u32;
    }
    last + 1u32
}

/// The first column of the largest key, from `start` to before `end` of a row that begins at `from`.
#[cube]
fn likeliest<E: Float>(logits: &Tensor<E>, from: usize, start: u32, end: u32) -> i32 {
    let mut best = 0u32;
    let mut found = start;
    let mut column = start;
    while column < end {
        let key = key(f32::cast_from(logits[from + column as usize]));
        found = select(key > best, column, found);
        best = max(best, key);
        column += 1u32;
    }
    i32::cast_from(found)
}

/// Draws each row's token; −1 where a row has none.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn draw_overlapped<E: Float>(
    logits: &Tensor<E>,
    largest: &Tensor<u32>,
    summaries: &Tensor<u32>,
    seeds: &Tensor<i32>,
    positions: &Tensor<i32>,
    tokens: &mut Tensor<i32>,
    limits: Limits,
    rows: u32,
    columns: u32,
    stretches: u32,
    #[comptime] cuts: Cuts,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
) {
    take_turn(overlaps);
    was_written(logits, overlaps);
    was_written(largest, overlaps);
    was_written(summaries, overlaps);
    was_written(seeds, overlaps);
    was_written(positions, overlaps);
    let row = CUBE_POS as u32;
    if row >= rows {
        terminate!();
    }
    let mut sums = Shared::<[u32]>::new_slice(comptime!(2 * UNITS));
    let mut own_summaries = Shared::<[u32]>::new_slice(comptime!(MOST_STRETCHES * SUMMARY));
    let mut word = UNIT_POS;
    while word < stretches * comptime!(SUMMARY as u32) {
        let of_row = (row * stretches) as usize * comptime!(SUMMARY);
        own_summaries[word as usize] = summaries[of_row + word as usize];
        word += comptime!(UNITS as u32);
    }
    sync_cube();
    let kept = Kept {
        largest: largest_of(largest, row, stretches),
        threshold: own_summaries[3],
        top_p: comptime!(cuts.top_p),
    };
    // Of those that tie, the first ones in the tokens' order are kept.
    let need = Wide {
        low: own_summaries[4],
        high: own_summaries[5],
    };
    let all = ratio(kept.threshold, kept.largest, limits.temperature);
    let most = ties_that_give(need, weight(all));
    let tied = kept.weight(kept.threshold, limits);

    let mut low = 0u32;
    let mut high = 0u32;
    let mut ties = 0u32;
    let mut number = 0u32;
    while number < stretches {
        let at = number as usize * comptime!(SUMMARY);
        let some = min(own_summaries[at + 2], most - ties);
        let sum = Wide { low, high }
            .plus(Wide {
                low: own_summaries[at],
                high: own_summaries[at + 1],
            })
            .plus(tied.times(some));
        low = sum.low;
        high = sum.high;
        ties += some;
        number += 1u32;
    }
    let seed = Wide {
        low: u32::reinterpret(seeds[2 * row as usize]),
        high: u32::reinterpret(seeds[2 * row as usize + 1]),
    };
    // The token comes after the position that was read last.
    let random = bits(seed, u32::reinterpret(positions[row as usize]) + 1u32);
    let drawn = Wide { low, high }.share(random);

    // The stretch that it is in, and what comes before.
    let mut before_low = 0u32;
    let mut before_high = 0u32;
    let mut ties_before = 0u32;
    let mut chosen = 0u32;
    low = 0u32;
    high = 0u32;
    ties = 0u32;
    number = 0u32;
    while number < stretches {
        let at = number as usize * comptime!(SUMMARY);
        let begins = Wide { low, high };
        if !drawn.is_below(begins) {
            before_low = low;
            before_high = high;
            ties_before = ties;
            chosen = number;
        }
        let some = min(own_summaries[at + 2], most - ties);
        let sum = begins
            .plus(Wide {
                low: own_summaries[at],
                high: own_summaries[at + 1],
            })
            .plus(tied.times(some));
        low = sum.low;
        high = sum.high;
        ties += some;
        number += 1u32;
    }

    // A run of columns a unit.
    let length = columns.div_ceil(stretches);
    let start = min(chosen * length, columns);
    let end = min(start + length, columns);
    let each = length.div_ceil(comptime!(UNITS as u32));
    let own_start = min(start + UNIT_POS * each, end);
    let own_end = min(own_start + each, end);
    let from = row as usize * columns as usize;
    low = 0u32;
    high = 0u32;
    ties = 0u32;
    let mut column = own_start;
    while column < own_end {
        let key = key(f32::cast_from(logits[from + column as usize]));
        let sum = Wide { low, high }.plus(kept.above(key, limits));
        low = sum.low;
        high = sum.high;
        ties += kept.tie(key);
        column += 1u32;
    }
    let ties_to = cube_sums(Wide::of(ties), &mut sums).to.low + ties_before;
    let mut used = min(ties_to - ties, most);
    let some = min(ties_to, most) - used;
    let own = Wide { low, high }.plus(tied.times(some));
    let found = cube_sums(own, &mut sums);
    let before = Wide {
        low: before_low,
        high: before_high,
    };
    let reached = found.to.plus(before);
    let begins = reached.minus(own);
    // Here weights may be rounded otherwise than where the stretches were added up: what was drawn beyond the last one is the last one.
    let last = found.all.plus(before).minus(Wide::of(1u32));
    let is_beyond = last.is_below(drawn);
    let drawn = Wide {
        low: select(is_beyond, last.low, drawn.low),
        high: select(is_beyond, last.high, drawn.high),
    };
    let exists = kept.largest > 0u32;
    let is_empty = found.all.low == 0u32 && found.all.high == 0u32;
    if UNIT_POS == 0 && !exists {
        tokens[CUBE_POS] = -1i32;
    }
    if UNIT_POS == 0 && exists && is_empty {
        // All of its weights may be rounded to nothing: then it is the likeliest.
        tokens[CUBE_POS] = likeliest(logits, from, start, end);
    }
    if exists && !is_empty && !drawn.is_below(begins) && drawn.is_below(reached) {
        low = begins.low;
        high = begins.high;
        let mut token = own_end;
        column = own_start;
        while column < own_end {
            let key = key(f32::cast_from(logits[from + column as usize]));
            let is_tie = kept.tie(key) > 0u32 && used < most;
            used += select(is_tie, 1u32, 0u32);
            let sum = Wide { low, high }.plus(kept.above(key, limits)).plus(Wide {
                low: select(is_tie, tied.low, 0u32),
                high: select(is_tie, tied.high, 0u32),
            });
            low = sum.low;
            high = sum.high;
            // The first whose sum passes it.
            if token == own_end && drawn.is_below(sum) {
                token = column;
            }
            column += 1u32;
        }
        tokens[CUBE_POS] = i32::cast_from(token);
    }
}
