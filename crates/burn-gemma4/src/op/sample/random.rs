//! Counter-based random numbers by Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3). The key
//! is a sequence's seed, and the counter is the position of the drawn token.

#[cfg(feature = "cube")]
use super::wide::Wide;
#[cfg(feature = "cube")]
use cubecl::prelude::*;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// Returns 64 random bits for a seed and a position.
pub(crate) fn random_bits(seed: u64, position: u32) -> u64 {
    let mut counter = [position, 0, 0, 0];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..ROUNDS {
        let product = |index: usize| u64::from(MULTIPLIERS[index]) * u64::from(counter[2 * index]);
        let (first, second) = (product(0), product(1));
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    u64::from(counter[1]) << 32 | u64::from(counter[0])
}

/// Computes [`random_bits`] on the device.
#[cfg(feature = "cube")]
#[cube]
pub(super) fn bits(seed: Wide, position: u32) -> Wide {
    let mut first = position;
    let mut second = 0u32;
    let mut third = 0u32;
    let mut fourth = 0u32;
    let mut low_key = seed.low;
    let mut high_key = seed.high;
    let mut round = 0u32;
    while round < comptime!(ROUNDS) {
        let product = Wide::of(first).times(comptime!(MULTIPLIERS[0]));
        let other = Wide::of(third).times(comptime!(MULTIPLIERS[1]));
        first = other.high ^ second ^ low_key;
        second = other.low;
        third = product.high ^ fourth ^ high_key;
        fourth = product.low;
        low_key += comptime!(WEYL[0]);
        high_key += comptime!(WEYL[1]);
        round += 1u32;
    }
    Wide {
        low: first,
        high: second,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the random bits for seed 0 and position 0 with the first two words of the test vector in the Philox
    /// paper.
    #[test]
    fn random_bits_matches_test_vector() {
        assert_eq!(random_bits(0, 0), 0xE169_C58D_6627_E8D5);
    }
}
