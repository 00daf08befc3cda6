//! Dropout of probabilities by a counter-based generator, so that the backward draws the same bits as the forward.
//!
//! The generator is Philox 2x32 with 7 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011). Each query
//! head of each sequence has its own generator key, which is drawn from the seed. The generator's counter is the index of a
//! *cell* of four scores: queries `i` and `i + 8` with keys `j` and `j + 8`, where both `i % 16` and `j % 16` are below 8. In
//! fragments of an `mma` or `wgmma` product, a thread holds whole cells. The thread therefore draws each random bit only once.
//!
//! Each score of a cell gets 16 of the 64 drawn bits. The probability of the score is dropped if these 16 bits are below a
//! threshold.

#[cfg(feature = "cube")]
pub(crate) mod kernel;

/// The number of rounds of the generator. The generator's authors found no failures of statistical tests from 7 rounds on.
const ROUNDS: usize = 7;

/// The multiplier in each round of the generator.
const MULTIPLIER: u32 = 0xD256_D193;

/// The increment of the generator key between two rounds.
const WEYL: u32 = 0x9E37_79B9;

/// The number of different values of the 16 random bits that a score gets.
pub(crate) const LEVELS: u32 = 1 << 16;

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
    let cell_index = |position: u32| position / 16 * 8 + position % 8;
    let drawn = philox(cell_index(query), cell_index(key), head_key);
    let word = drawn[(key / 8 % 2) as usize];
    word >> (query / 8 % 2 * 16) & 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the rate of each random bit and the correlation of neighbouring scores, by chi-square statistics over many
    /// scores.
    #[test]
    fn bits_are_uniform_and_independent_of_neighbours() {
        let (queries, keys) = (512u32, 512u32);
        let mut buckets = [0u32; 256];
        let mut pairs = [[0u32; 4]; 6];
        for plane in 0..4 {
            let own = head_key(77, plane);
            let other = head_key(78, plane);
            let next_plane = head_key(77, plane + 1);
            for query in 0..queries {
                for key in 0..keys {
                    let value = bits(own, query, key);
                    buckets[(value >> 8) as usize] += 1;
                    let high = |value: u32| (value >> 15) as usize;
                    for (pair, neighbour) in [
                        bits(own, query + 1, key),
                        bits(own, query, key + 1),
                        bits(own, query + 8, key),
                        bits(own, query, key + 8),
                        bits(other, query, key),
                        bits(next_plane, query, key),
                    ]
                    .into_iter()
                    .enumerate()
                    {
                        pairs[pair][2 * high(value) + high(neighbour)] += 1;
                    }
                }
            }
        }
        let statistic = |counts: &[u32]| {
            let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
            let square = |count: &u32| (f64::from(*count) - expected).powi(2) / expected;
            counts.iter().map(square).sum::<f64>()
        };
        // The bounds are 6 standard deviations above the mean. A chi-square with `n` degrees of freedom has the mean `n` and
        // the variance `2 n`.
        assert!(statistic(&buckets) < 255.0 + 6.0 * 510f64.sqrt());
        for pair in pairs {
            assert!(
                statistic(&pair) < 3.0 + 6.0 * 6f64.sqrt() + 12.0,
                "{pair:?}"
            );
        }
    }
}
