//! Dropout of probabilities by a counter-based random generator. The backward can therefore draw the same bits as the
//! forward.
//!
//! The generator is Philox 2x32 with 7 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011).
//! Each query head of each sequence has its own generator key. The generator's counter is the index of a *cell* of
//! eight scores: queries `i` and `i + 8` with keys `j`, `j + 1`, `j + 8` and `j + 9`. Both `i % 16` and `j % 16` are
//! below 8, and `j` is even. In an `mma` or `wgmma` fragment whose rows are queries, each thread holds whole cells.
//!
//! One draw has 64 bits, which is one byte for each score of the cell. Each score gets 16 *random bits*. Their high
//! byte is the score's own byte, and their low byte is the byte of another score of the cell. The chance of a drop is
//! therefore a multiple of 2⁻¹⁶. The chance that two scores of a cell are both dropped differs by less than 2⁻⁹ from
//! the chance for independent scores. An exclusive or of two bytes would be closer, but integer instructions limit the
//! speed of dropout: Hopper runs half as many of them in a clock as additions of floats.
//!
//! [`Threshold`] decides which probabilities are dropped. Kernels compare the bits of two scores with the threshold in one
//! instruction, as if the bits were f16 numbers.

#[cfg(feature = "cube")]
pub(crate) mod kernel;

/// The number of rounds of dropout's random generator. In the statistical tests of the generator's authors, the
/// generator failed no test with 7 or more rounds.
const ROUNDS: usize = 7;

/// The multiplier in each round of dropout's random generator.
const MULTIPLIER: u32 = 0xD256_D193;

/// The number that dropout's random generator adds to its key between two rounds.
const WEYL: u32 = 0x9E37_79B9;

/// The number of different values that the 16 random bits of a score can have.
const LEVELS: u32 = 1 << 16;

/// The bits of the f16 number infinity. Larger values of the lower 15 bits are NaN, and comparisons with NaN are false.
const INFINITY: u32 = 0x7C00;

/// The threshold for random bits that decides which probabilities dropout drops.
///
/// Kernels read the threshold as an f16 number, and likewise the 16 random bits of each score. If the random bits are
/// above the threshold, the score is a *hit*. Dropout drops the probabilities of hits. For a high chance of a drop,
/// even the threshold −∞ may give too few hits. Dropout then keeps the probabilities of hits and drops all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Threshold {
    /// The threshold, as the bits of an f16 number.
    pub bits: u32,
    /// True if dropout keeps the probabilities of hits and drops all others. A hit is a score whose random bits are
    /// above the threshold.
    pub keeps_hits: bool,
}

impl Threshold {
    /// Returns the threshold with which dropout drops each element of P with the chance `probability`. The chance is
    /// first rounded to a multiple of 2⁻¹⁶.
    pub(crate) fn of(probability: f64) -> Self {
        let dropped = (probability * f64::from(LEVELS)).round() as u32;
        let keeps_hits = dropped > hits(0x8000 | INFINITY);
        let wanted = if keeps_hits {
            LEVELS - dropped
        } else {
            dropped
        };
        let bits = match wanted {
            ..=INFINITY => INFINITY - wanted,
            // Here, a hit is a 16-bit value that is above the threshold, read as an f16 number. A positive threshold
            // has at most 0x7C00 (`INFINITY`) hits. A negative threshold has at least 0x7C00 + 2 hits, because the f16
            // numbers +0 and −0 are hits too.
            _ => 0x8000 | (wanted - INFINITY - 1).max(1),
        };
        Self { bits, keeps_hits }
    }

    /// The 16 random bits of a score have [`LEVELS`] possible values. Returns the number of these values for which
    /// dropout keeps the score's probability.
    fn kept_levels(self) -> u32 {
        let hits = hits(self.bits);
        if self.keeps_hits { hits } else { LEVELS - hits }
    }

    /// Returns the factor by which kernels multiply kept probabilities. With this factor, dropout preserves the mean of
    /// each probability.
    pub(crate) fn kept_scale(self) -> f64 {
        f64::from(LEVELS) / f64::from(self.kept_levels())
    }

    /// True if dropout keeps the probability of a score whose random bits are `random_bits`.
    pub(crate) fn keeps(self, random_bits: u32) -> bool {
        is_above(random_bits, self.bits) == self.keeps_hits
    }
}

/// True if `bits` is above `threshold`. Both are read as f16 numbers.
fn is_above(bits: u32, threshold: u32) -> bool {
    let number = |bits: u32| {
        let magnitude = (bits & 0x7FFF) as i32;
        if bits & 0x8000 == 0 {
            magnitude
        } else {
            -magnitude
        }
    };
    bits & 0x7FFF <= INFINITY && number(bits) > number(threshold)
}

/// Returns how many 16-bit values are above `threshold`. The values and the threshold are read as f16 numbers.
fn hits(threshold: u32) -> u32 {
    let magnitude = threshold & 0x7FFF;
    match threshold & 0x8000 {
        0 => INFINITY - magnitude,
        _ if magnitude == 0 => INFINITY,
        _ => INFINITY + 1 + magnitude,
    }
}

fn philox(mut first: u32, mut second: u32, mut key: u32) -> [u32; 2] {
    for _ in 0..ROUNDS {
        let product = u64::from(first) * u64::from(MULTIPLIER);
        first = (product >> 32) as u32 ^ key ^ second;
        second = product as u32;
        key = key.wrapping_add(WEYL);
    }
    [first, second]
}

/// Returns the generator key of a query head. `plane` is the index of the head among all heads of all sequences.
pub(crate) fn head_key(seed: u64, plane: u32) -> u32 {
    philox(plane, (seed >> 32) as u32, seed as u32)[0]
}

/// Returns the 16 random bits of a score.
pub(crate) fn bits(head_key: u32, query: u32, key: u32) -> u32 {
    let query_cell = query / 16 * 8 + query % 8;
    let key_cell = key / 16 * 4 + key % 8 / 2;
    let drawn = philox(query_cell, key_cell, head_key);
    // The generator draws two words for a cell of eight scores: queries `i` and `i + 8` with keys `j`, `j + 1`, `j + 8`
    // and `j + 9`. The first word is for query `i`, and the second for query `i + 8`. The low half of a word is for
    // keys `j` and `j + 8`. The high half is for keys `j + 1` and `j + 9`. A half has the bits of the smaller key. Those
    // of the larger key are the low byte of this half, and the high byte of the same half of the other word.
    let half = |word: u32| word >> (key % 2 * 16) & 0xFFFF;
    let own = half(drawn[(query / 8 % 2) as usize]);
    let other = half(drawn[(1 - query / 8 % 2) as usize]);
    match key / 8 % 2 {
        0 => own,
        _ => (own & 0xFF) << 8 | other >> 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threshold_drops_the_nearest_share() {
        for probability in [
            0.0, 1e-5, 0.001, 0.1, 0.25, 0.484, 0.4844, 0.5, 0.9, 0.968, 0.97, 0.99,
        ] {
            let threshold = Threshold::of(probability);
            let kept = (0..LEVELS).filter(|bits| threshold.keeps(*bits)).count();
            let dropped = 1.0 - kept as f64 / f64::from(LEVELS);
            let step = 1.0 / f64::from(LEVELS);
            assert!(
                (dropped - probability).abs() <= step,
                "{probability} {dropped}"
            );
            assert_eq!(threshold.kept_levels() as usize, kept);
        }
    }

    /// Checks by chi-square statistics that each random bit is 1 at the right rate, and that neighboring scores are not
    /// correlated.
    #[test]
    fn bits_are_uniform_and_independent_of_neighbours() {
        let (queries, keys) = (512u32, 512u32);
        let threshold = Threshold::of(0.1);
        let mut buckets = [[0u32; 256]; 2];
        let mut pairs = [[0u32; 4]; 7];
        let mut both_dropped = [0u32; 7];
        for plane in 0..4 {
            let own = head_key(77, plane);
            let other = head_key(78, plane);
            let next_plane = head_key(77, plane + 1);
            for query in 0..queries {
                for key in 0..keys {
                    let value = bits(own, query, key);
                    buckets[0][(value >> 8) as usize] += 1;
                    buckets[1][(value & 0xFF) as usize] += 1;
                    let high = |value: u32| (value >> 15) as usize;
                    for (pair, neighbour) in [
                        bits(own, query + 1, key),
                        bits(own, query, key + 1),
                        bits(own, query + 8, key),
                        bits(own, query, key + 8),
                        bits(own, query + 8, key + 8),
                        bits(other, query, key),
                        bits(next_plane, query, key),
                    ]
                    .into_iter()
                    .enumerate()
                    {
                        pairs[pair][2 * high(value) + high(neighbour)] += 1;
                        let is_kept = threshold.keeps(value) || threshold.keeps(neighbour);
                        both_dropped[pair] += u32::from(!is_kept);
                    }
                }
            }
        }
        let statistic = |counts: &[u32]| {
            let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
            let square = |count: &u32| (f64::from(*count) - expected).powi(2) / expected;
            counts.iter().map(square).sum::<f64>()
        };
        // The test's upper bounds are 6 standard deviations above the mean. A chi-square with `n` degrees of freedom has the
        // mean `n` and the variance `2 n`.
        for buckets in buckets {
            assert!(statistic(&buckets) < 255.0 + 6.0 * 510f64.sqrt());
        }
        for pair in pairs {
            assert!(
                statistic(&pair) < 3.0 + 6.0 * 6f64.sqrt() + 12.0,
                "{pair:?}"
            );
        }
        let scores = f64::from(4 * queries * keys);
        let mean = scores * (1.0 - 1.0 / threshold.kept_scale()).powi(2);
        for both in both_dropped {
            let deviation = (f64::from(both) - mean).abs() / mean.sqrt();
            assert!(deviation < 6.0, "{both_dropped:?} beside {mean}");
        }
    }
}
