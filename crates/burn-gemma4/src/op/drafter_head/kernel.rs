//! The first and last kernels of a drafter's step. The first kernel concatenates a token's embedding with the previous
//! position's residual stream. The last kernel writes the draft token.
//!
//! Budget: shared memory holds 8 bytes per unit. Registers hold one vector in the first kernel, and one logit and its
//! token in the last kernel.
//!
//! Bound: latency; rows are a few KB. The first kernel has two dependent reads: the token, and the token's row of the
//! embedding table.

use crate::op::argmax::kernel::bring_best_first;
use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile};
use cubecl::prelude::*;

/// The number of units in a cube.
pub(super) const UNITS: usize = 128;

/// The layout of the embeddings and the residual streams that `join_pdl` concatenates.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Joined {
    /// The index of the first row's token in the tensor of tokens.
    pub first: u32,
    /// Two strides, in vectors: the distance between rows of the table, and the distance between rows of the streams.
    pub table_stride: u32,
    pub stream_stride: u32,
    /// The number of vectors in an embedding. A row of the residual stream has the same number of vectors.
    pub vectors: u32,
    /// The total number of vectors in all output rows.
    pub all: u32,
}

/// Writes `[rows, 2 · columns]`: each output row is the embedding of its token, followed by the row of `streams`.
///
/// If `by_tokens` is true, the kernel looks up the embeddings in `table`, and multiplies them by a scale that is
/// rounded to the table's dtype. Otherwise row `i` of `table` is the embedding of output row `i`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn join_pdl<E: Float, I: Int, N: Size>(
    table: &Tensor<Vector<E, N>>,
    tokens: &Tensor<I>,
    streams: &Tensor<Vector<E, N>>,
    output: &mut Tensor<Vector<E, N>>,
    joined: Joined,
    scale: f32,
    #[comptime] by_tokens: bool,
    #[comptime] pdl: bool,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
    #[define(N)] _vector: usize,
) {
    launch_dependents_and_wait(pdl);
    mark_volatile(table, pdl);
    mark_volatile(tokens, pdl);
    mark_volatile(streams, pdl);
    let at = ABSOLUTE_POS as u32;
    if at < joined.all {
        let row = at / (2u32 * joined.vectors);
        let column = at % (2u32 * joined.vectors);
        if column < joined.vectors {
            if comptime!(by_tokens) {
                let token = u32::cast_from(tokens[(joined.first + row) as usize]);
                let place = token as usize * joined.table_stride as usize + column as usize;
                let scale = f32::cast_from(E::cast_from(scale));
                let scaled =
                    Vector::<f32, N>::cast_from(table[place]) * Vector::<f32, N>::cast_from(scale);
                output[at as usize] = Vector::<E, N>::cast_from(scaled);
            } else {
                output[at as usize] = table[(row * joined.table_stride + column) as usize];
            }
        } else {
            let place = row * joined.stream_stride + column - joined.vectors;
            output[at as usize] = streams[place as usize];
        }
    }
}

/// Finds the largest logit of each row among `parts` partial results, and writes the token of this logit to the tensor
/// of draft tokens. On ties the smaller token id wins. The draft token is 0 if the tokens of all partial results are
/// −1. One cube handles a row.
#[cube(launch_unchecked)]
pub(super) fn place_guess_pdl<I: Int>(
    largest: &Tensor<f32>,
    tokens_of_largest: &Tensor<I>,
    guesses: &mut Tensor<I>,
    first: u32,
    parts: u32,
    #[comptime] pdl: bool,
    #[define(I)] _integer: ElemType,
) {
    launch_dependents_and_wait(pdl);
    mark_volatile(largest, pdl);
    mark_volatile(tokens_of_largest, pdl);
    let row = CUBE_POS as u32;
    let mut best = f32::new(f32::MIN);
    let mut best_token = u32::MAX.runtime();
    let mut part = UNIT_POS;
    while part < parts {
        let at = (row * parts + part) as usize;
        let token = tokens_of_largest[at];
        let number = select(token < I::new(0), u32::MAX, u32::cast_from(token));
        let value = largest[at];
        if value > best || (value == best && number < best_token) {
            best = value;
            best_token = number;
        }
        part += comptime!(UNITS as u32);
    }
    let mut values = Shared::<[f32]>::new_slice(UNITS);
    let mut tokens = Shared::<[u32]>::new_slice(UNITS);
    values[UNIT_POS as usize] = best;
    tokens[UNIT_POS as usize] = best_token;
    bring_best_first(&mut values, &mut tokens, UNITS);
    if UNIT_POS == 0 {
        let token = tokens[0];
        let is_missing = token == u32::MAX;
        guesses[(first + row) as usize] = I::cast_from(select(is_missing, 0u32, token));
    }
}
