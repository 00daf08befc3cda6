//! Concatenates the attention outputs of all heads.
//!
//! Budget: one vector per unit in registers, no shared memory. Bound: latency. The input is a few rows of a few KB.

use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile};
use cubecl::prelude::*;

/// The number of units in a cube.
pub(super) const UNITS: usize = 128;

/// The sizes and strides of the tensor that holds the heads. The strides are in vectors. The channels of one head fill
/// `vectors` vectors.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Heads {
    pub heads: u32,
    pub positions: u32,
    pub vectors: u32,
    pub of_sequence: u32,
    pub of_head: u32,
    pub of_position: u32,
    /// The total number of vectors in the tensor of heads.
    pub all: u32,
}

/// Permutes `[sequences, heads, positions, channels]` to `[sequences · positions, heads · channels]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rows_of_heads_pdl<E: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    output: &mut Tensor<Vector<E, N>>,
    heads: Heads,
    #[comptime] pdl: bool,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    launch_dependents_and_wait(pdl);
    mark_volatile(input, pdl);
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
