//! What heads have read, side by side.
//!
//! Budget: registers alone, a vector a unit. Bound by latency: a few rows of a few kilobytes; of reads that wait for each other there are none.

use cube_kit::overlap::{take_turn, was_written};
use cubecl::prelude::*;

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// Sizes of heads, and how they lie, in vectors.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Heads {
    pub heads: u32,
    pub positions: u32,
    pub vectors: u32,
    pub of_sequence: u32,
    pub of_head: u32,
    pub of_position: u32,
    /// Of all heads.
    pub all: u32,
}

/// `[sequences, heads, positions, channels]` to `[sequences · positions, heads · channels]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rows_of_heads_overlapped<E: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    output: &mut Tensor<Vector<E, N>>,
    heads: Heads,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    take_turn(overlaps);
    was_written(input, overlaps);
    let at = ABSOLUTE_POS as u32;
    if at < heads.all {
        let head = at / heads.vectors % heads.heads;
        let row = at / heads.vectors / heads.heads;
        let place = row / heads.positions * heads.of_sequence
            + head * heads.of_head
            + row % heads.positions * heads.of_position
            + at % heads.vectors;
        output[at as usize] = input[place as usize];
    }
}
