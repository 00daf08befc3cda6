//! Problems near the limit of a software driver, which silently ends each loop of a unit after 65,535 iterations.

use crate::case::Case;

/// The loop that marks a masked tile's used columns has more iterations than the loop of the QK products: 90 instead of
/// 81 for each of 740 blocks.
#[test]
fn masked_forward_beyond_the_loop_limit_matches_reference() {
    Case {
        mask: Some([false, false, false, true]),
        lse_gradient: false,
        ..Case::new([1, 1, 1, 33, 47_300, 33, 33])
    }
    .check();
}
