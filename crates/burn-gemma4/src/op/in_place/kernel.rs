//! Kernels that overwrite tensors in place: copies, and updates of the inputs of decoding.
//!
//! Budget: registers hold one element or vector; no shared memory. Bound: memory bandwidth, and launch latency for
//! small targets.

use cubecl::prelude::*;

/// The number of elements or vectors in each target.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Counts {
    pub first: u32,
    pub second: u32,
    pub third: u32,
}

/// Copies consecutive ranges of the source to up to three targets, one range to each target.
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

/// Copies three sources to three targets. With CubeCL's metadata, the kernel binds 7 buffers. A fourth copy would need
/// 9 buffers, and some WebGPU devices support only 8.
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

/// The sizes and strides of a row copy, in vectors.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Row {
    pub heads: u32,
    /// The number of vectors that the kernel copies from each head.
    pub count: u32,
    /// The number of vectors between two heads of the source.
    pub source_stride: u32,
    /// The number of vectors between two heads of the target.
    pub target_stride: u32,
    /// The index of the row that the kernel overwrites in the target.
    pub index: u32,
}

/// Copies the first `row.count` vectors of each head of the source to the same head of row `row.index` of the target.
/// The target is contiguous.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn copy_row<N: Numeric, S: Size>(
    source: &Tensor<Vector<N, S>>,
    target: &mut Tensor<Vector<N, S>>,
    row: Row,
    #[define(N)] _number: ElemType,
    #[define(S)] _vector: usize,
) {
    let heads = row.heads as usize;
    let count = row.count as usize;
    let target_stride = row.target_stride as usize;
    let first = row.index as usize * heads * target_stride;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    let mut at = ABSOLUTE_POS;
    while at < heads * count {
        let head = at / count;
        let vector = at % count;
        target[first + head * target_stride + vector] =
            source[head * row.source_stride as usize + vector];
        at += stride;
    }
}

/// The sizes and strides of a copy of slots, in vectors. A slot holds the elements of one token and head.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct SlotCopy {
    pub heads: u32,
    /// The number of slots that the kernel copies from each head.
    pub count: u32,
    /// The number of vectors in a slot.
    pub width: u32,
    /// The number of slots of a head in the source. The copy continues at slot 0 after the last slot.
    pub source_slots: u32,
    /// The first slot that the kernel copies.
    pub source_first: u32,
    /// The number of vectors between two slots of the source.
    pub source_slot_stride: u32,
    /// The number of vectors between two heads of the source.
    pub source_head_stride: u32,
    /// The number of slots of a head in the target, which is contiguous.
    pub target_slots: u32,
}

/// Copies consecutive slots of each head of the source to consecutive slots of the same head of the target. The first
/// slot in the target is `first[0]`, or slot 0 without `first`. Drops slots beyond the end of the target.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn copy_slots<N: Numeric, S: Size>(
    source: &Tensor<Vector<N, S>>,
    first: ComptimeOption<&Tensor<i32>>,
    target: &mut Tensor<Vector<N, S>>,
    copy: SlotCopy,
    #[define(N)] _number: ElemType,
    #[define(S)] _vector: usize,
) {
    let mut target_first = 0u32;
    #[comptime]
    match &first {
        ComptimeOption::Some(first) => target_first = u32::cast_from(first[0]),
        ComptimeOption::None => {}
    }
    let of_head = copy.count as usize * copy.width as usize;
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    let mut at = ABSOLUTE_POS;
    while at < copy.heads as usize * of_head {
        let head = at / of_head;
        let of_slot = (at % of_head) as u32;
        let slot = of_slot / copy.width;
        let vector = (of_slot % copy.width) as usize;
        let from = (copy.source_first + slot) % copy.source_slots;
        let to = target_first + slot;
        if to < copy.target_slots {
            let from = head * copy.source_head_stride as usize
                + from as usize * copy.source_slot_stride as usize;
            let to = (head * copy.target_slots as usize + to as usize) * copy.width as usize;
            target[to + vector] = source[from + vector];
        }
        at += stride;
    }
}

/// The sizes and strides of a copy of keys and values, in vectors.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct RangesCopy {
    pub heads: u32,
    /// The number of vectors in a slot.
    pub width: u32,
    /// The number of slots of a head in the sources.
    pub source_slots: u32,
    /// The number of slots of a head in a row of the targets, which are contiguous.
    pub target_slots: u32,
    pub key_head_stride: u32,
    pub key_slot_stride: u32,
    pub value_head_stride: u32,
    pub value_slot_stride: u32,
}

/// Copies ranges of slots of keys and values to rows of the targets, for each head. The second dimension of the grid
/// selects the range. `ranges` has four numbers for each range: the first slot of the sources, the row of the targets,
/// the first slot in this row, and the number of slots. A range continues at slot 0 after the last slot.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn copy_ranges<N: Numeric, S: Size>(
    keys: &Tensor<Vector<N, S>>,
    values: &Tensor<Vector<N, S>>,
    ranges: &Tensor<i32>,
    target_keys: &mut Tensor<Vector<N, S>>,
    target_values: &mut Tensor<Vector<N, S>>,
    copy: RangesCopy,
    #[define(N)] _number: ElemType,
    #[define(S)] _vector: usize,
) {
    let range = CUBE_POS_Y as usize * 4;
    let first = ranges[range] as usize;
    let row = ranges[range + 1] as usize;
    let target_first = ranges[range + 2] as usize;
    let width = copy.width as usize;
    let of_head = ranges[range + 3] as usize * width;
    let heads = copy.heads as usize;
    let target_slots = copy.target_slots as usize;
    let stride = CUBE_COUNT_X as usize * CUBE_DIM as usize;
    let mut at = CUBE_POS_X as usize * CUBE_DIM as usize + UNIT_POS as usize;
    while at < heads * of_head {
        let head = at / of_head;
        let offset = (at % of_head) / width;
        let vector = at % width;
        let slot = (first + offset) % copy.source_slots as usize;
        let target_slot = (target_first + offset) % target_slots;
        let to = ((row * heads + head) * target_slots + target_slot) * width + vector;
        target_keys[to] = keys
            [head * copy.key_head_stride as usize + slot * copy.key_slot_stride as usize + vector];
        target_values[to] = values[head * copy.value_head_stride as usize
            + slot * copy.value_slot_stride as usize
            + vector];
        at += stride;
    }
}

/// Overwrites the tokens with the chosen tokens, and adds one to each position and length. A chosen token of −1 means
/// that there is no token, and becomes token 0.
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

/// The numbers and strides of the rows that `begin_round` copies.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Rows {
    pub count: u32,
    pub columns: u32,
    /// The row stride of `streams`, in elements. The field `target_stride` is the row stride of `hidden`, in elements.
    pub stride: u32,
    pub target_stride: u32,
}

/// Overwrites tokens, positions and lengths with the first, second and third quarter of `numbers`. The last quarter of
/// `numbers` holds row indices of `streams`. The rows with these indices are copied to `hidden`.
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

/// Writes the inputs of the verification pass. For each sequence the inputs are one length, several tokens, and the
/// positions of these tokens. A sequence's tokens are its token in `first_tokens`, with which the drafter run began,
/// then its draft tokens. `guesses` holds the draft tokens in the order of the drafter's steps.
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
