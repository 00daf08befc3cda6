//! Problems near the limit of a software driver, which ends a unit's loops silently after 65,535 iterations.

use crate::case::Case;

/// A masked tile marks its used columns, which takes iterations: 90 for each of 740 blocks, where the products take 81.
#[test]
fn masked_forward_beyond_the_loop_limit_is_right() {
    Case {
        mask: Some([false, false, false, true]),
        lse_gradient: false,
        ..Case::new([1, 1, 1, 33, 47_300, 33, 33])
    }
    .check();
}
