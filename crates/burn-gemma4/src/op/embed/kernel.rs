//! What the layers begin with, of few rows: tokens' rows of a table with the norm that comes next, and per-layer embeddings.
//!
//! Budget: a float a part of the cube in shared memory, in registers a unit's vectors of each operand, as [`norm`](super::super::norm) has them.
//! Bound by latency: a cube has one row, or one layer's columns of one, which it reads once. Reads that wait for each other: a token, and by it
//! its row of a table. Behind the launch before there is one, of the projection; where tables are computed, these, too.

use crate::op::sums::{Team, first_cube_sum, sum_of_squares};
use cube_kit::{
    overlap::{
        await_previous, let_next_begin, load_element_now, load_now, was_written,
        was_written_if_there,
    },
    rounding::rounded_vector,
};
use cubecl::prelude::*;

/// How a launch is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct EmbedPlan {
    pub team: Team,
    /// Vectors of a unit.
    pub held: usize,
    pub overlaps: bool,
    /// Whether no launch writes tokens, tables and weights, so that they are read before the launch before has ended.
    pub reads_ahead: bool,
    /// Whether vectors are such as can be read at once there.
    pub loads_now: bool,
}

/// A table whose rows are read.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct TableRows {
    pub rows: u32,
    /// Vectors from a row to the next.
    pub stride: u32,
}

/// `table[token] · scale`, rounded to the table's element, and its norm.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn embed_overlapped<E: Float, I: Int, N: Size>(
    tokens: &Tensor<I>,
    table: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    embedded: &mut Tensor<Vector<E, N>>,
    normed: &mut Tensor<Vector<E, N>>,
    table_rows: TableRows,
    rows: u32,
    vectors: u32,
    columns: f32,
    scale: f32,
    epsilon: f32,
    #[comptime] plan: EmbedPlan,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
    #[define(N)] _vector: usize,
) {
    let_next_begin(plan.overlaps);
    let computed = comptime!(plan.overlaps && !plan.reads_ahead);
    await_previous(computed);
    was_written(tokens, computed);
    was_written(table, computed);
    was_written(weight, computed);
    if CUBE_POS >= rows as usize {
        terminate!();
    }
    let (team, held) = comptime!((plan.team, plan.held));
    let now = comptime!(plan.reads_ahead && plan.loads_now);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));
    let token = load_element_now(tokens.as_slice(), CUBE_POS, plan.reads_ahead);
    let from = row_of_token::<I>(token, table_rows);

    let mut values = Array::<Vector<E, N>>::new(held);
    let mut weights = Array::<Vector<E, N>>::new(held);
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            weights[index] = load_now(weight, vector as usize, now);
            values[index] = load_now(table, from + vector as usize, now);
        }
    }
    await_previous(comptime!(plan.overlaps && plan.reads_ahead));

    let row = CUBE_POS * vectors as usize;
    let scale = Vector::<f32, N>::cast_from(scale);
    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            let scaled = Vector::<f32, N>::cast_from(values[index]) * scale;
            let scaled = rounded_vector::<E, N>(scaled);
            embedded[row + vector as usize] = scaled;
            values[index] = scaled;
            squares += sum_of_squares(scaled);
        }
    }
    let mean = first_cube_sum(squares, &mut partial, team) / columns;
    let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            let value = Vector::<f32, N>::cast_from(values[index])
                * factor
                * Vector::<f32, N>::cast_from(weights[index]);
            normed[row + vector as usize] = Vector::<E, N>::cast_from(value);
        }
    }
}

/// Factors of per-layer embeddings.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Factors {
    /// Of the projection, in f32.
    pub projected: f32,
    /// Of the table's rows, which are rounded to its element.
    pub table: f32,
    /// Of the sum, in f32.
    pub sum: f32,
}

/// `(norm(projected · factor) + table[token] · factor) · factor` of each layer's columns, in f32. Without tokens a row's number is its own.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn per_layer_overlapped<E: Float, I: Int, N: Size>(
    projected: &Tensor<Vector<E, N>>,
    tokens: ComptimeOption<&Tensor<I>>,
    table: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    output: &mut Tensor<Vector<E, N>>,
    table_rows: TableRows,
    factors: Factors,
    rows: u32,
    layers: u32,
    vectors: u32,
    columns: f32,
    epsilon: f32,
    #[comptime] plan: EmbedPlan,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
    #[define(N)] _vector: usize,
) {
    let_next_begin(plan.overlaps);
    let computed = comptime!(plan.overlaps && !plan.reads_ahead);
    await_previous(computed);
    was_written_if_there(tokens, computed);
    was_written(table, computed);
    was_written(weight, computed);
    let row = CUBE_POS as u32 / layers;
    if row >= rows {
        terminate!();
    }
    let (team, held) = comptime!((plan.team, plan.held));
    let now = comptime!(plan.reads_ahead && plan.loads_now);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));
    let mut from = row as usize * table_rows.stride as usize;
    #[comptime]
    match tokens {
        ComptimeOption::Some(tokens) => {
            let token = load_element_now(tokens.as_slice(), row as usize, plan.reads_ahead);
            from = row_of_token::<I>(token, table_rows);
        }
        ComptimeOption::None => {}
    }
    let of_layer = (CUBE_POS as u32 % layers) as usize * vectors as usize;
    let to = CUBE_POS * vectors as usize;

    let mut values = Array::<Vector<f32, N>>::new(held);
    let mut of_tokens = Array::<Vector<E, N>>::new(held);
    let mut weights = Array::<Vector<E, N>>::new(held);
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            weights[index] = load_now(weight, vector as usize, now);
            of_tokens[index] = load_now(table, from + of_layer + vector as usize, now);
        }
    }
    await_previous(comptime!(plan.overlaps && plan.reads_ahead));
    was_written(projected, plan.overlaps);
    let factor = Vector::<f32, N>::cast_from(factors.projected);
    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            values[index] = Vector::<f32, N>::cast_from(projected[to + vector as usize]) * factor;
            squares += sum_of_squares(values[index]);
        }
    }
    let mean = first_cube_sum(squares, &mut partial, team) / columns;
    let factor = Vector::<f32, N>::cast_from(1.0f32 / (mean + epsilon).sqrt());
    #[unroll]
    for index in 0..held {
        let vector = UNIT_POS + comptime!((index * team.units) as u32);
        if vector < vectors {
            let of_token = Vector::<f32, N>::cast_from(of_tokens[index])
                * Vector::<f32, N>::cast_from(factors.table);
            let of_token = Vector::<f32, N>::cast_from(rounded_vector::<E, N>(of_token));
            let normed = values[index] * factor * Vector::<f32, N>::cast_from(weights[index]);
            let sum = (normed + of_token) * Vector::<f32, N>::cast_from(factors.sum);
            output[to + vector as usize] = rounded_vector::<E, N>(sum);
        }
    }
}

/// Where a token's row begins: of one that is none of the table's, its last.
#[cube]
fn row_of_token<I: Int>(token: I, table: TableRows) -> usize {
    let row = min(u32::cast_from(token), table.rows - 1u32);
    row as usize * table.stride as usize
}
