//! Copies numbers over others.

use cubecl::prelude::*;

#[cube(launch_unchecked)]
pub(super) fn copy<N: Numeric>(
    source: &Tensor<N>,
    target: &mut Tensor<N>,
    count: u32,
    #[define(N)] _number: ElemType,
) {
    if ABSOLUTE_POS < count as usize {
        target[ABSOLUTE_POS] = source[ABSOLUTE_POS];
    }
}
