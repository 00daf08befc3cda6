//! Copies numbers over others, and goes on from tokens to the next ones.

use cubecl::prelude::*;

/// How many numbers each of the targets has.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Counts {
    pub first: u32,
    pub second: u32,
    pub third: u32,
}

/// The numbers of a source over those of up to three targets, one target after the other.
#[cube(launch_unchecked)]
pub(super) fn copy<N: Numeric>(
    source: &Tensor<N>,
    first: &mut Tensor<N>,
    second: &mut ComptimeOption<OwnedTensor<N>>,
    third: &mut ComptimeOption<OwnedTensor<N>>,
    counts: Counts,
    #[define(N)] _number: ElemType,
) {
    let at = ABSOLUTE_POS as u32;
    let before_third = counts.first + counts.second;
    if at < counts.first {
        first[at as usize] = source[at as usize];
    } else if at < before_third {
        write(second, at - counts.first, source, at);
    } else if at < before_third + counts.third {
        write(third, at - before_third, source, at);
    }
}

#[cube]
fn write<N: Numeric>(
    target: &mut ComptimeOption<OwnedTensor<N>>,
    place: u32,
    source: &Tensor<N>,
    at: u32,
) {
    #[comptime]
    match target {
        ComptimeOption::Some(target) => {
            target[place as usize] = source[at as usize];
        }
        ComptimeOption::None => {}
    }
}

/// The tokens that were chosen over those before them, whose positions and lengths become the next. Where nothing was chosen, which is −1, the
/// first token, so that what reads it finds something.
#[cube(launch_unchecked)]
pub(super) fn go_on<I: Int>(
    chosen: &Tensor<I>,
    tokens: &mut Tensor<I>,
    positions: &mut Tensor<I>,
    lengths: &mut Tensor<I>,
    rows: u32,
    #[define(I)] _integer: ElemType,
) {
    if ABSOLUTE_POS < rows as usize {
        tokens[ABSOLUTE_POS] = max(chosen[ABSOLUTE_POS], I::new(0));
        positions[ABSOLUTE_POS] += I::new(1);
        lengths[ABSOLUTE_POS] += I::new(1);
    }
}
