//! Copies numbers over others.

use cubecl::prelude::*;

/// `count` numbers over as many others, and those behind them over `second`, where it is there.
#[cube(launch_unchecked)]
pub(super) fn copy<N: Numeric>(
    source: &Tensor<N>,
    target: &mut Tensor<N>,
    second: &mut ComptimeOption<OwnedTensor<N>>,
    count: u32,
    #[define(N)] _number: ElemType,
) {
    let count = count as usize;
    if ABSOLUTE_POS < count {
        target[ABSOLUTE_POS] = source[ABSOLUTE_POS];
    }
    #[comptime]
    match second {
        ComptimeOption::Some(second) => {
            if ABSOLUTE_POS < count {
                second[ABSOLUTE_POS] = source[count + ABSOLUTE_POS];
            }
        }
        ComptimeOption::None => {}
    }
}
