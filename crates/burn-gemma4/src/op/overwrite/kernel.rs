//! Copies numbers over others, goes on from tokens to the next ones, and to guesses and back.
//!
//! Budget: a number or a vector in registers, no shared memory. Bound by memory's rate, and where a target is small by the launch.

use cubecl::prelude::*;

/// How many numbers, or vectors of them, each of the targets has.
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

#[cube]
fn copy_vectors<E: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    target: &mut Tensor<Vector<E, N>>,
    count: u32,
) {
    let mut place = ABSOLUTE_POS;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    while place < count as usize {
        target[place] = source[place];
        place += stride;
    }
}

/// The vectors of three sources over those of as many targets. With what CubeCL tells a kernel of its tensors they are 7 buffers, of the 8 that
/// every device of WebGPU's binds.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn copy_each<E: Float, N: Size>(
    first: &Tensor<Vector<E, N>>,
    second: &Tensor<Vector<E, N>>,
    third: &Tensor<Vector<E, N>>,
    first_target: &mut Tensor<Vector<E, N>>,
    second_target: &mut Tensor<Vector<E, N>>,
    third_target: &mut Tensor<Vector<E, N>>,
    counts: Counts,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    copy_vectors(first, first_target, counts.first);
    copy_vectors(second, second_target, counts.second);
    copy_vectors(third, third_target, counts.third);
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

/// Where a row's numbers are, and how many.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Rows {
    pub count: u32,
    pub columns: u32,
    /// From a row of the source to the next, and of the target.
    pub stride: u32,
    pub target_stride: u32,
}

/// Of numbers, as many of each, tokens, positions and lengths over those before them, and then those rows of the streams over the ones that a round begins with.
#[cube(launch_unchecked)]
pub(super) fn begin_round<E: Float, I: Int>(
    numbers: &Tensor<I>,
    streams: &Tensor<E>,
    tokens: &mut Tensor<I>,
    positions: &mut Tensor<I>,
    lengths: &mut Tensor<I>,
    hidden: &mut Tensor<E>,
    rows: Rows,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    let at = ABSOLUTE_POS as u32;
    if at < rows.count * rows.columns {
        let row = at / rows.columns;
        let column = at % rows.columns;
        let from = u32::cast_from(numbers[(3u32 * rows.count + row) as usize]);
        let place = from * rows.stride + column;
        hidden[(row * rows.target_stride + column) as usize] = streams[place as usize];
    }
    if at < rows.count {
        tokens[at as usize] = numbers[at as usize];
        positions[at as usize] = numbers[(rows.count + at) as usize];
        lengths[at as usize] = numbers[(2u32 * rows.count + at) as usize];
    }
}

/// Of each sequence the token that a round began with and its guesses, with their positions and the lengths after them. A round's guesses are one step's after the
/// other, as many as there are sequences.
#[cube(launch_unchecked)]
pub(super) fn take_guesses<I: Int>(
    first_tokens: &Tensor<I>,
    first_positions: &Tensor<I>,
    guesses: &Tensor<I>,
    tokens: &mut Tensor<I>,
    positions: &mut Tensor<I>,
    lengths: &mut Tensor<I>,
    batch: u32,
    count: u32,
    #[define(I)] _integer: ElemType,
) {
    let at = ABSOLUTE_POS as u32;
    if at < batch * count {
        let sequence = at / count;
        let step = at % count;
        let first = first_positions[sequence as usize];
        positions[at as usize] = first + I::cast_from(step);
        if step == 0u32 {
            tokens[at as usize] = first_tokens[sequence as usize];
            lengths[sequence as usize] = first + I::cast_from(count);
        } else {
            tokens[at as usize] = guesses[((step - 1u32) * batch + sequence) as usize];
        }
    }
}
