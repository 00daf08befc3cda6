//! Copies integers over others.

use cubecl::prelude::*;

#[cube(launch_unchecked)]
pub(super) fn copy<I: Int>(
    source: &Tensor<I>,
    target: &mut Tensor<I>,
    count: u32,
    #[define(I)] _integer: ElemType,
) {
    if ABSOLUTE_POS < count as usize {
        target[ABSOLUTE_POS] = source[ABSOLUTE_POS];
    }
}
