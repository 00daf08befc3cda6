//! The draw of a token, in two kernels. A row holds the logits of one text, with one column per token. A section is a
//! consecutive range of a row's columns.
//!
//! The first kernel sums the weights of the kept tokens in each section. Top-k, top-p and min-p decide which tokens are
//! kept. The second kernel draws the first token, in token order, at which the running sum of weights exceeds a random
//! number.
//!
//! Budget: less than 3 KB of shared memory. Schedule: the first kernel runs one cube per section, and the second kernel
//! runs one cube per row. Bound: latency. The first kernel reads the logits once. The second kernel reads the sums of
//! all sections, then the logits of one section twice.

use super::{
    random::bits,
    search::{Cuts, Limits, SearchTarget, after_top_k, descend},
    section::{AHEAD, LogitsSizes, MOST_STRETCHES, largest_of, next_keys, stretch},
    weight::{key, ratio, weight},
    wide::{UNITS, Wide, cube_sums},
};
use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile, mark_volatile_if_present};
use cubecl::prelude::*;

/// The number of words in the summary of a section. A sort key is an integer that compares as its logit does. The
/// threshold is the smallest sort key that is kept.
///
/// - words 0 and 1: the summed weight of the tokens with a sort key above the threshold
/// - word 2: the number of tokens whose sort key equals the threshold
/// - word 3: the threshold
/// - words 4 and 5: the summed weight that top-p still needs from the tokens whose sort key equals the threshold
pub(super) const SUMMARY: usize = 6;
/// The number of bits of a column index.
pub(super) const COLUMN_BITS: u32 = 22;

/// The criteria that decide which tokens of a row are kept.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Kept {
    largest: u32,
    /// The smallest sort key that is kept. A sort key is an integer that compares as its logit does.
    threshold: u32,
    /// True if top-p is active. Top-p may keep only some of the tokens whose sort key equals `threshold`.
    #[cube(comptime)]
    top_p: bool,
}

#[cube]
impl Kept {
    /// Returns the weight of a logit whose sort key is above `threshold`, the smallest kept sort key. Returns 0 for any
    /// other logit. Without top-p, a sort key equal to `threshold` counts as above.
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

    /// Returns 1 if top-p is active and the sort key equals `threshold`, the smallest kept sort key. Otherwise returns
    /// 0.
    pub fn tie(&self, key: u32) -> u32 {
        if comptime!(self.top_p) {
            select(key == self.threshold, 1u32, 0u32)
        } else {
            0u32.runtime()
        }
    }

    /// Returns the weight of the logit with this sort key, or 0 if min-p removes the logit.
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

/// Sums the weights of the kept tokens in each section of a row's columns.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn keep_pdl<E: Float>(
    logits: &Tensor<E>,
    largest: &Tensor<u32>,
    before: ComptimeOption<&Tensor<u32>>,
    summaries: &mut Tensor<u32>,
    limits: Limits,
    sizes: LogitsSizes,
    #[comptime] cuts: Cuts,
    #[comptime] pdl: bool,
    #[define(E)] _element: ElemType,
) {
    let LogitsSizes {
        rows,
        columns,
        stretches,
    } = sizes;
    launch_dependents_and_wait(pdl);
    mark_volatile(logits, pdl);
    mark_volatile(largest, pdl);
    mark_volatile_if_present(before, pdl);
    let stretch = stretch(columns, stretches);
    if stretch.row >= rows {
        terminate!();
    }
    let mut sums = Shared::<[u32]>::new_slice(comptime!(2 * UNITS));
    // Find the smallest kept sort key by top-p, or by top-k if top-p is off.
    let found = if comptime!(cuts.top_p) {
        let records = before.unwrap();
        descend(
            records,
            stretch,
            stretches,
            limits,
            &mut sums,
            3u32,
            SearchTarget::Rest,
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

/// Returns the smallest number of tokens of equal `weight` whose summed weight is at least `need`, by binary search.
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

/// Returns the column with the largest logit among columns `start..end`. If several columns have this logit, returns
/// the first of these columns. The row begins at element `from`.
#[cube]
fn argmax<E: Float>(logits: &Tensor<E>, from: usize, start: u32, end: u32) -> i32 {
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

/// Draws the token of each row, or writes −1 for a row without a possible token.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn draw_pdl<E: Float>(
    logits: &Tensor<E>,
    largest: &Tensor<u32>,
    summaries: &Tensor<u32>,
    seeds: &Tensor<i32>,
    positions: &Tensor<i32>,
    tokens: &mut Tensor<i32>,
    limits: Limits,
    sizes: LogitsSizes,
    #[comptime] cuts: Cuts,
    #[comptime] pdl: bool,
    #[define(E)] _element: ElemType,
) {
    let LogitsSizes {
        rows,
        columns,
        stretches,
    } = sizes;
    launch_dependents_and_wait(pdl);
    mark_volatile(logits, pdl);
    mark_volatile(largest, pdl);
    mark_volatile(summaries, pdl);
    mark_volatile(seeds, pdl);
    mark_volatile(positions, pdl);
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
    // Several tokens may have the smallest kept sort key. Of these tokens, top-p keeps the first ones in token order:
    // as many as are needed for a summed weight of `need`.
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
    // Use the position of the drawn token, which follows the last position of the text, as the counter of the random
    // number generator.
    let random = bits(seed, u32::reinterpret(positions[row as usize]) + 1u32);
    let drawn = Wide { low, high }.share(random);

    // Find the section of columns that contains the drawn token, and the sum of weights before that section.
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

    // Assign a consecutive range of the section's columns to each unit, so that the running sum over units is in token
    // order.
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
    // Make the random number smaller than the last running sum. Otherwise the random number could exceed all running
    // sums, because the two kernels may round weights differently. No token would then be drawn.
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
        // If the weights of all tokens in the section of columns round to zero, choose the most likely token of the
        // section.
        tokens[CUBE_POS] = argmax(logits, from, start, end);
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
            // Take the first token whose running sum exceeds the random number.
            if token == own_end && drawn.is_below(sum) {
                token = column;
            }
            column += 1u32;
        }
        tokens[CUBE_POS] = i32::cast_from(token);
    }
}
