//! The search for the smallest sort key that top-k or top-p keeps. A sort key is an integer that compares as its logit
//! does. Each launch of this radix search determines eight bits of the sort key.
//!
//! Algorithm: each cube builds a histogram over a section, which is a range of a row's columns. The histogram covers
//! the sort keys that begin with the bits found so far. The next eight bits of a sort key select the bin. For top-k a
//! bin counts tokens, and for top-p a bin sums weights.
//!
//! In the next launch every cube adds the histograms of all sections of its row. The cube sums the bins from the
//! largest sort keys down. The bin in which the sum reaches the target gives eight more bits of the searched sort key.
//!
//! Budget: 10 KB of shared memory, and registers for one bin per unit. Bound: latency. After the first launch the
//! logits and the histograms come from the L2 cache, with several loads in flight.

use super::{
    section::{AHEAD, LogitsSizes, Stretch, largest_of, next_keys, stretch},
    weight::{KEY_OF_NOTHING, KEY_OF_ZERO, ratio, weight},
    wide::{UNITS, Wide, cube_sums},
};
use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile, mark_volatile_if_present};
use cubecl::prelude::*;

/// The number of bins in a histogram, one for each value of eight bits of the sort key.
pub(super) const BINS: usize = 256;
/// The number of words that a cube writes for its section, a range of columns: two words per bin, then the four words
/// of [`Found`].
pub(super) const RECORD: usize = 2 * BINS + 4;
/// The number of histograms that a cube keeps in shared memory. Each unit adds to one of these histograms. Most logits
/// fall into few bins, so several histograms reduce contention between atomics.
const COPIES: usize = 4;

/// The state of the search for a threshold, the smallest sort key that is kept.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Found {
    /// The smallest sort key that the search counts. Top-p counts only sort keys that top-k keeps.
    pub floor: u32,
    /// The upper bits of the smallest kept sort key. Earlier launches have determined these bits.
    pub prefix: u32,
    /// The number of tokens, or the summed weight, that is still missing to reach the target. The tokens whose sort
    /// keys have the upper bits `prefix` must contribute this amount.
    pub need: Wide,
}

/// The target of a search. The kept tokens must reach this number of tokens, or this summed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SearchTarget {
    /// The number of tokens that top-k keeps.
    Count,
    /// The summed weight that top-p keeps: a fraction of the sum of all weights. The fraction is `Limits::top_p`, in
    /// units of 2⁻³².
    Share,
    /// The part of the target that was still missing after the previous launch of the search.
    Rest,
}

/// The cuts that the sampling options request: top-k, top-p or both. Each cut needs a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Cuts {
    pub top_k: bool,
    pub top_p: bool,
}

/// One launch of the search, which determines eight bits of the sort key. `digit` is the index of these eight bits,
/// where 0 stands for the uppermost eight bits. `weighed` is true if the bins sum weights, and false if the bins count
/// tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Step {
    pub digit: u32,
    pub weighed: bool,
}

/// The sampling options as numbers for the kernels.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Limits {
    pub temperature: f32,
    pub top_k: u32,
    /// The total probability that top-p keeps, in units of 2⁻³².
    pub top_p: u32,
    /// The natural logarithm of min-p. A token is kept if its weight divided by the most likely token's weight is at
    /// least min-p.
    pub least: f32,
}

/// For each section of a row's columns, finds the largest sort key. A sort key is an integer that compares as its logit
/// does.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn largest_keys_pdl<E: Float>(
    logits: &Tensor<E>,
    largest: &mut Tensor<u32>,
    sizes: LogitsSizes,
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
    let stretch = stretch(columns, stretches);
    if stretch.row >= rows {
        terminate!();
    }
    let from = stretch.row as usize * columns as usize;
    let mut best = 0u32;
    let mut column = stretch.start + UNIT_POS;
    while column < stretch.end {
        let keys = next_keys(logits, from, column, stretch.end);
        #[unroll]
        for ahead in 0..AHEAD {
            best = max(best, keys[ahead]);
        }
        column += comptime!((AHEAD * UNITS) as u32);
    }
    let mut found = Shared::<[u32]>::new_slice(UNITS);
    found[UNIT_POS as usize] = best;
    let mut half = comptime!(UNITS as u32 / 2).runtime();
    while half > 0u32 {
        sync_cube();
        if UNIT_POS < half {
            let other = found[(UNIT_POS + half) as usize];
            found[UNIT_POS as usize] = max(found[UNIT_POS as usize], other);
        }
        half /= 2u32;
    }
    if UNIT_POS == 0 {
        largest[CUBE_POS] = found[0];
    }
}

/// Adds up the histograms that the previous launch built for all sections of a row. The sums determine eight more bits
/// of the smallest kept sort key. Synchronizes the cube.
#[cube]
pub(super) fn descend(
    records: &Tensor<u32>,
    stretch: Stretch,
    stretches: u32,
    limits: Limits,
    sums: &mut Shared<[u32]>,
    #[comptime] digit: u32,
    #[comptime] target: SearchTarget,
) -> Found {
    let first = (stretch.row * stretches) as usize * comptime!(RECORD);
    // Assign the bin of the largest sort keys to unit 0, so that the running sum over units goes from the largest sort
    // keys down.
    let bin = comptime!(BINS as u32 - 1) - UNIT_POS;
    let mut low = 0u32;
    let mut high = 0u32;
    let mut number = 0u32;
    let mut lows = Array::<u32>::new(AHEAD);
    let mut highs = Array::<u32>::new(AHEAD);
    while number < stretches {
        #[unroll]
        for ahead in 0..AHEAD {
            let other = min(number + comptime!(ahead as u32), stretches - 1u32);
            let at = first + other as usize * comptime!(RECORD) + 2 * bin as usize;
            lows[ahead] = records[at];
            highs[ahead] = records[at + 1];
        }
        #[unroll]
        for ahead in 0..AHEAD {
            let exists = number + comptime!(ahead as u32) < stretches;
            let sum = Wide { low, high }.plus(Wide {
                low: select(exists, lows[ahead], 0u32),
                high: select(exists, highs[ahead], 0u32),
            });
            low = sum.low;
            high = sum.high;
        }
        number += comptime!(AHEAD as u32);
    }
    let own = Wide { low, high };
    let found = cube_sums(own, sums);
    let reached = found.to;
    let all = found.all;
    let before = reached.minus(own);

    let state = first + comptime!(2 * BINS);
    let target = if comptime!(target == SearchTarget::Count) {
        let asked = Wide::of(limits.top_k);
        let fewer = all.is_below(asked);
        Wide {
            low: select(fewer, all.low, asked.low),
            high: select(fewer, all.high, asked.high),
        }
    } else if comptime!(target == SearchTarget::Share) {
        let share = all.share(Wide {
            low: 0u32,
            high: limits.top_p,
        });
        // The target is top-p times the sum of all weights, rounded up. The function `share` rounds the product down,
        // so add 1 if the product has a fraction.
        let rest = select(all.low * limits.top_p == 0u32, 0u32, 1u32);
        share.plus(Wide::of(rest))
    } else {
        Wide {
            low: records[state + 2],
            high: records[state + 3],
        }
    };

    let mut chosen = Shared::<[u32]>::new_slice(3usize);
    if UNIT_POS == 0 {
        // Set defaults for a row in which no bin reaches the target, such as a row of NaN.
        chosen[0] = 0u32;
        chosen[1] = 0u32;
        chosen[2] = 0u32;
    }
    sync_cube();
    if before.is_below(target) && !reached.is_below(target) {
        let need = target.minus(before);
        chosen[0] = bin;
        chosen[1] = need.low;
        chosen[2] = need.high;
    }
    sync_cube();
    Found {
        floor: records[state],
        prefix: records[state + 1] | (chosen[0] << comptime!(24 - 8 * digit)),
        need: Wide {
            low: chosen[1],
            high: chosen[2],
        },
    }
}

/// Returns the initial state of a search that considers only sort keys of at least `floor`.
#[cube]
fn beginning(floor: u32) -> Found {
    Found {
        floor,
        prefix: 0u32,
        need: Wide {
            low: 0u32,
            high: 0u32,
        },
    }
}

/// Returns the smallest sort key that top-k keeps. `threshold` is the sort key of the k-th largest logit, and all
/// logits equal to this logit are kept. If this logit is 0, −0 is also kept, and the result is the sort key of −0.
#[cube]
pub(super) fn floor_of(threshold: u32) -> u32 {
    let tied = select(
        threshold == comptime!(KEY_OF_ZERO),
        comptime!(KEY_OF_ZERO - 1),
        threshold,
    );
    max(tied, comptime!(KEY_OF_NOTHING + 1))
}

/// Returns the initial state of the search for top-p. The search considers only the sort keys that top-k keeps. Without
/// top-k, the search considers all sort keys above the sort key of −∞.
#[cube]
pub(super) fn after_top_k(
    records: ComptimeOption<&Tensor<u32>>,
    stretch: Stretch,
    stretches: u32,
    limits: Limits,
    sums: &mut Shared<[u32]>,
) -> Found {
    #[comptime]
    match records {
        ComptimeOption::Some(records) => {
            let found = descend(
                records,
                stretch,
                stretches,
                limits,
                sums,
                3u32,
                SearchTarget::Rest,
            );
            beginning(floor_of(found.prefix))
        }
        ComptimeOption::None => beginning(comptime!(KEY_OF_NOTHING + 1).runtime()),
    }
}

/// Runs one launch of the search for the smallest kept sort key. First reads the previous launch's histograms, which
/// determine eight more bits of this key. Then builds histograms of the eight bits after them.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn count_pdl<E: Float>(
    logits: &Tensor<E>,
    largest: &Tensor<u32>,
    before: ComptimeOption<&Tensor<u32>>,
    records: &mut Tensor<u32>,
    limits: Limits,
    sizes: LogitsSizes,
    #[comptime] step: Step,
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
    let lows = Shared::<[Atomic<u32>]>::new_slice(comptime!(COPIES * BINS));
    let highs = Shared::<[Atomic<u32>]>::new_slice(comptime!(COPIES * BINS));
    #[unroll]
    for copy in 0..comptime!(COPIES) {
        lows[UNIT_POS as usize + copy * UNITS].store(0u32);
        highs[UNIT_POS as usize + copy * UNITS].store(0u32);
    }

    let found = if comptime!(step.digit == 0) {
        after_top_k(before, stretch, stretches, limits, &mut sums)
    } else {
        let target = comptime!(match (step.digit, step.weighed) {
            (1, false) => SearchTarget::Count,
            (1, true) => SearchTarget::Share,
            _ => SearchTarget::Rest,
        });
        let digit = comptime!(step.digit - 1);
        descend(
            before.unwrap(),
            stretch,
            stretches,
            limits,
            &mut sums,
            digit,
            target,
        )
    };
    let largest = largest_of(largest, stretch.row, stretches);
    sync_cube();

    let shift = comptime!(24 - 8 * step.digit);
    let from = stretch.row as usize * columns as usize;
    let mut column = stretch.start + UNIT_POS;
    while column < stretch.end {
        let keys = next_keys(logits, from, column, stretch.end);
        #[unroll]
        for ahead in 0..AHEAD {
            let key = keys[ahead];
            let mut counts = key >= found.floor;
            if comptime!(step.digit > 0) {
                counts = counts && (key ^ found.prefix) >> comptime!(shift + 8) == 0u32;
            }
            if counts {
                let bin = (key >> shift) & comptime!(BINS as u32 - 1);
                let at =
                    (bin * comptime!(COPIES as u32) + UNIT_POS % comptime!(COPIES as u32)) as usize;
                if comptime!(step.weighed) {
                    let weight = weight(ratio(key, largest, limits.temperature));
                    let old = lows[at].fetch_add(weight.low);
                    let sum = old + weight.low;
                    let carry = select(sum < old, 1u32, 0u32);
                    let upper = weight.high + carry;
                    if upper > 0u32 {
                        highs[at].fetch_add(upper);
                    }
                } else {
                    lows[at].fetch_add(1u32);
                }
            }
        }
        column += comptime!((AHEAD * UNITS) as u32);
    }
    sync_cube();

    let mut low = 0u32;
    let mut high = 0u32;
    #[unroll]
    for copy in 0..comptime!(COPIES) {
        let at = UNIT_POS as usize * COPIES + copy;
        let sum = Wide { low, high }.plus(Wide {
            low: lows[at].load(),
            high: highs[at].load(),
        });
        low = sum.low;
        high = sum.high;
    }
    let record = CUBE_POS * comptime!(RECORD);
    records[record + 2 * UNIT_POS as usize] = low;
    records[record + 2 * UNIT_POS as usize + 1] = high;
    if UNIT_POS == 0 {
        let state = record + comptime!(2 * BINS);
        records[state] = found.floor;
        records[state + 1] = found.prefix;
        records[state + 2] = found.need.low;
        records[state + 3] = found.need.high;
    }
}
