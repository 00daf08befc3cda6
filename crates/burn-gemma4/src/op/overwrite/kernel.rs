//! Copies numbers over others, and goes on from tokens to the next ones.

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

/// `inputs` are tokens and, behind them, their positions: those that were chosen after them, one position on. Where nothing was chosen, which is
/// −1, the first token, so that what reads it finds something.
#[cube(launch_unchecked)]
pub(super) fn go_on<I: Int>(
    chosen: &Tensor<I>,
    inputs: &mut Tensor<I>,
    rows: u32,
    #[define(I)] _integer: ElemType,
) {
    if ABSOLUTE_POS < rows as usize {
        inputs[ABSOLUTE_POS] = max(chosen[ABSOLUTE_POS], I::new(0));
        inputs[ABSOLUTE_POS + rows as usize] += I::new(1);
    }
}
