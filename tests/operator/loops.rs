//! Tests of problems near the limit of a software driver, which silently ends each loop of a unit after 65,535 iterations.

use crate::case::Case;

/// Checks a masked forward whose longest loop has more than 65,535 iterations. This loop finds out which columns (keys)
/// of a masked tile are used by at least one row. It has 90 iterations for each of 740 blocks, 66,600 in total.
#[test]
fn masked_forward_beyond_the_loop_limit_matches_reference() {
    Case {
        mask: Some([false, false, false, true]),
        lse_gradient: false,
        ..Case::new([1, 1, 1, 33, 47_300, 33, 33])
    }
    .check();
}
