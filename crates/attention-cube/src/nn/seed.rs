//! The seeds of the modules' dropout.

use std::sync::atomic::{AtomicU64, Ordering};

/// The seed of the next call with dropout.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Sets the seed from which the modules of this process draw their dropout, so that a run can be repeated.
///
/// Each forward with active dropout takes the next seed. The order of the forwards therefore decides which one gets which seed.
///
/// ```
/// attention_cube::nn::seed_dropout(42);
/// ```
pub fn seed_dropout(seed: u64) {
    NEXT.store(seed, Ordering::Relaxed);
}

/// Returns the seed of a call, which no other call gets before the counter is set anew.
pub(super) fn next_seed() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}
