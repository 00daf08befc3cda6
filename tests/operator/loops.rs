//! Problems near the limit of a software driver, which ends a unit's loops silently after 65,535 iterations.

use crate::case::Case;

/// Marking what a mask leaves of a tile takes iterations, too: 740 blocks of 90, of which 81 are the products'.
#[test]
fn masked_forward_beyond_the_loop_limit_is_right() {
    Case {
        mask: Some([false, false, false, true]),
        lse_gradient: false,
        ..Case::new([1, 1, 1, 33, 47_300, 33, 33])
    }
    .check();
}
