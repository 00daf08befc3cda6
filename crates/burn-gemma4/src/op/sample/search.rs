//! The search for the least key that top-k or top-p keeps, eight bits of it a launch.
//!
//! Each cube counts a stretch of a row by the next eight bits of the keys whose upper ones are found already: tokens for top-k, their
//! weights for top-p. The next launch adds up what the stretches have found, every cube for itself, and goes on in the bin where the
//! sum, from the largest key down, reaches what is asked for.
//!
//! Budget: 10 KB of shared memory, a bin a unit in registers. Bound by latency: the logits come from the L2 cache after the first launch, several at
//! once, and so does what the stretches have found.

use super::{
    weight::{KEY_OF_NOTHING, KEY_OF_ZERO, key, ratio, weight},
    wide::{UNITS, Wide, cube_sums},
};
use cube_kit::overlap::{take_turn, was_written, was_written_if_there};
use cubecl::prelude::*;

/// Values of eight bits.
pub(super) const BINS: usize = 256;
/// Words of what a stretch has found: two a bin, then those of [`Found`].
pub(super) const RECORD: usize = 2 * BINS + 4;
/// Copies of a cube's bins. Most logits are in few bins, where units would wait for each other.
const COPIES: usize = 4;
/// Stretches of a row at most: every cube reads what all of a row have counted.
pub(super) const MOST_STRETCHES: usize = 32;
/// Numbers that a unit has on their way before it uses the first.
pub(super) const AHEAD: usize = 8;

/// A row, and a cube's part of it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Stretch {
    pub row: u32,
    /// Its first column, and the one after its last.
    pub start: u32,
    pub end: u32,
}

/// The stretch of a cube.
#[cube]
pub(super) fn stretch(columns: u32, stretches: u32) -> Stretch {
    let row = CUBE_POS as u32 / stretches;
    let number = CUBE_POS as u32 % stretches;
    let length = columns.div_ceil(stretches);
    let start = min(number * length, columns);
    Stretch {
        row,
        start,
        end: min(start + length, columns),
    }
}

/// The keys of [`AHEAD`] columns of a row that begins at `from`, each a cube's units after the one before; 0, which is below all others, from `end` on.
#[cube]
pub(super) fn next_keys<E: Float>(
    logits: &Tensor<E>,
    from: usize,
    column: u32,
    end: u32,
) -> Array<u32> {
    let mut read = Array::<f32>::new(AHEAD);
    #[unroll]
    for ahead in 0..AHEAD {
        let at = min(column + comptime!((ahead * UNITS) as u32), end - 1u32);
        read[ahead] = f32::cast_from(logits[from + at as usize]);
    }
    let mut keys = Array::<u32>::new(AHEAD);
    #[unroll]
    for ahead in 0..AHEAD {
        let at = column + comptime!((ahead * UNITS) as u32);
        keys[ahead] = select(at < end, key(read[ahead]), 0u32);
    }
    keys
}

/// What is known of a threshold.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Found {
    /// Keys below it are not among those that are counted.
    pub floor: u32,
    /// The threshold's bits as far as they are found.
    pub prefix: u32,
    /// What the keys that begin with these bits have still to give.
    pub need: Wide,
}

/// What a search's first sum is to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Target {
    /// So many tokens.
    Count,
    /// A share of all weights, in 2⁻³².
    Share,
    /// What the step before has left.
    Rest,
}

/// What the options ask of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Cuts {
    pub top_k: bool,
    pub top_p: bool,
}

/// A launch of the search: the eight bits that it counts, from the uppermost on, of tokens or of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Step {
    pub digit: u32,
    pub weighed: bool,
}

/// The numbers of the options.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Limits {
    pub temperature: f32,
    pub top_k: u32,
    /// In 2⁻³².
    pub top_p: u32,
    /// The least logarithm of a weight.
    pub least: f32,
}

/// The largest key of each stretch.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn largest_keys_overlapped<E: Float>(
    logits: &Tensor<E>,
    largest: &mut Tensor<u32>,
    rows: u32,
    columns: u32,
    stretches: u32,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
) {
    take_turn(overlaps);
    was_written(logits, overlaps);
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

/// The largest key of a row.
#[cube]
pub(super) fn largest_of(largest: &Tensor<u32>, row: u32, stretches: u32) -> u32 {
    let mut best = 0u32;
    // All at once, the last one again for those that there are not.
    #[unroll]
    for number in 0..MOST_STRETCHES {
        let number = min(comptime!(number as u32), stretches - 1u32);
        best = max(best, largest[(row * stretches + number) as usize]);
    }
    best
}

/// The next bits of a threshold from what a launch has counted by them. Syncs.
#[cube]
pub(super) fn descend(
    records: &Tensor<u32>,
    stretch: Stretch,
    stretches: u32,
    limits: Limits,
    sums: &mut Shared<[u32]>,
    #[comptime] digit: u32,
    #[comptime] target: Target,
) -> Found {
    let first = (stretch.row * stretches) as usize * comptime!(RECORD);
    // The largest keys' bin comes first.
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
    let target = if comptime!(target == Target::Count) {
        let asked = Wide::of(limits.top_k);
        let fewer = all.is_below(asked);
        Wide {
            low: select(fewer, all.low, asked.low),
            high: select(fewer, all.high, asked.high),
        }
    } else if comptime!(target == Target::Share) {
        let share = all.share(Wide {
            low: 0u32,
            high: limits.top_p,
        });
        // Rounded up.
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
        // Of a row without numbers there is no bin.
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

/// What a search knows at its beginning, of keys from `floor` on.
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

/// The least key that top-k keeps, with those that tie with it: −0 ties with 0.
#[cube]
pub(super) fn floor_of(threshold: u32) -> u32 {
    let tied = select(
        threshold == comptime!(KEY_OF_ZERO),
        comptime!(KEY_OF_ZERO - 1),
        threshold,
    );
    max(tied, comptime!(KEY_OF_NOTHING + 1))
}

/// What is known once top-k's search has ended, if there is one.
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
                Target::Rest,
            );
            beginning(floor_of(found.prefix))
        }
        ComptimeOption::None => beginning(comptime!(KEY_OF_NOTHING + 1).runtime()),
    }
}

/// One launch of a search: goes on with what the last one has counted, and counts the next bits.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn count_overlapped<E: Float>(
    logits: &Tensor<E>,
    largest: &Tensor<u32>,
    before: ComptimeOption<&Tensor<u32>>,
    records: &mut Tensor<u32>,
    limits: Limits,
    rows: u32,
    columns: u32,
    stretches: u32,
    #[comptime] step: Step,
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
            (1, false) => Target::Count,
            (1, true) => Target::Share,
            _ => Target::Rest,
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
