//! The rotation of heads.
//!
//! Budget: registers hold two channels, a cosine and a sine. Bound: memory bandwidth. Every channel is read and written
//! once.

use cubecl::prelude::*;

/// The strides of `[sequences, positions, heads, channels]` with contiguous channels.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(super) struct RowStrides {
    pub sequence: usize,
    pub position: usize,
    pub head: usize,
}

/// Rotates heads in f32, and rounds each result once. `direction` is 1 for the rotation, and -1 for its inverse.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rotate<E: Float>(
    heads: &Tensor<E>,
    cos: &Tensor<E>,
    sin: &Tensor<E>,
    output: &mut Tensor<E>,
    strides: RowStrides,
    positions: usize,
    heads_each: usize,
    pairs: usize,
    table_rows: usize,
    count: usize,
    direction: f32,
    #[define(E)] _element: ElemType,
) {
    if ABSOLUTE_POS >= count {
        terminate!();
    }
    let (row, pair) = (ABSOLUTE_POS / pairs, ABSOLUTE_POS % pairs);
    let (text, head) = (row / heads_each, row % heads_each);
    let (sequence, position) = (text / positions, text % positions);
    let from =
        sequence * strides.sequence + position * strides.position + head * strides.head + pair;
    let to = row * 2 * pairs + pair;
    let at = text % table_rows * pairs + pair;
    let first = f32::cast_from(heads[from]);
    let second = f32::cast_from(heads[from + pairs]);
    let (c, s) = (f32::cast_from(cos[at]), f32::cast_from(sin[at]) * direction);
    output[to] = E::cast_from(first * c - second * s);
    output[to + pairs] = E::cast_from(second * c + first * s);
}
