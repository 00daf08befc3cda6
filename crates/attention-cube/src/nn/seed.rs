//! The seeds of the modules' dropout.

use std::sync::atomic::{AtomicU64, Ordering};

/// The sum of two numbers: the process's seed after mixing, and the number of calls with dropout since the seed was
/// set. Without mixing, the second call with seed `n` would use the same dropout seed as the first call of a process
/// with seed `n + 1`.
static NEXT: AtomicU64 = AtomicU64::new(mixed(0));

/// Sets the seed for the dropout of attention probabilities in this process. An encoder's other dropouts use the random
/// numbers of the device.
///
/// Each forward pass with active dropout derives its own seed from this seed. The default seed is 0. In data-parallel
/// training, give each process its own seed.
///
/// ```
/// attention_cube::nn::seed_dropout(42);
/// ```
pub fn seed_dropout(seed: u64) {
    NEXT.store(mixed(seed), Ordering::Relaxed);
}

/// Returns the dropout seed of the next call.
pub(super) fn next_seed() -> u64 {
    mixed(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Mixes the bits of a number, by the function of SplitMix64 (Steele et al., OOPSLA 2014).
const fn mixed(number: u64) -> u64 {
    let z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
