//! What a drafter's step begins and ends with: a token's embedding beside the stream before it, and the guess.
//!
//! Budget: 8 bytes a unit in shared memory, in registers one vector or one number and its token. Bound by latency: rows of a few kilobytes. Reads that
//! wait for each other behind the launch before: the token and by it the row of the table; of the guess none.

use crate::op::argmax::kernel::bring_best_first;
use cube_kit::overlap::{take_turn, was_written};
use cubecl::prelude::*;

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// How rows lie that are joined.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Joined {
    /// The first row's token.
    pub first: u32,
    /// From a row of the table to the next, and from a row of the streams, in vectors.
    pub table_stride: u32,
    pub stream_stride: u32,
    /// Of an embedding, and of a stream.
    pub vectors: u32,
    /// Vectors of all rows.
    pub all: u32,
}

/// `[rows, 2 · columns]`: the tokens' embeddings, times a scale that is rounded as they are, then their streams. Where not `by_tokens`, the table's rows
/// are the embeddings.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn join_overlapped<E: Float, I: Int, N: Size>(
    table: &Tensor<Vector<E, N>>,
    tokens: &Tensor<I>,
    streams: &Tensor<Vector<E, N>>,
    output: &mut Tensor<Vector<E, N>>,
    joined: Joined,
    scale: f32,
    #[comptime] by_tokens: bool,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
    #[define(N)] _vector: usize,
) {
    take_turn(overlaps);
    was_written(table, overlaps);
    was_written(tokens, overlaps);
    was_written(streams, overlaps);
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

/// The best of each row's parts in the row's place among the guesses, of equal ones the smaller token: token 0 where no part has one, which is −1. A cube
/// a row.
#[cube(launch_unchecked)]
pub(super) fn place_guess_overlapped<I: Int>(
    largest: &Tensor<f32>,
    tokens_of_largest: &Tensor<I>,
    guesses: &mut Tensor<I>,
    first: u32,
    parts: u32,
    #[comptime] overlaps: bool,
    #[define(I)] _integer: ElemType,
) {
    take_turn(overlaps);
    was_written(largest, overlaps);
    was_written(tokens_of_largest, overlaps);
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
