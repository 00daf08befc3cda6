//! Embeddings of few rows. One kernel looks up token embeddings and computes the first layer's norm. The other kernel
//! computes per-layer embeddings.
//!
//! Budget: shared memory holds one float for each plane of the cube. Registers hold a unit's vectors of each tensor, as
//! in [`norm`](super::super::norm).
//!
//! Schedule: a cube handles one row, or one layer's columns of a row. If no launch writes the token and the table, the
//! kernel reads the token and the token's table row before it waits for the previous launch. Otherwise the kernel waits
//! first.
//!
//! Bound: latency.

use crate::op::norm::kernel::NormScalars;
use crate::op::sums::{Team, first_cube_sum, sum_of_squares};
use cube_kit::pdl::{
    launch_dependents, load_element_now, load_now, mark_volatile, mark_volatile_if_present,
    wait_prior_launch,
};
use cube_kit::rounding::rounded_vector;
use cubecl::prelude::*;

/// The compile-time plan of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct EmbedPlan {
    pub team: Team,
    /// The largest number of vectors that a unit keeps in registers.
    pub held: usize,
    pub pdl: bool,
    /// True if no launch writes the tokens, tables and weights. The kernel then reads these tensors before the previous
    /// launch has ended.
    pub reads_ahead: bool,
    /// True if a vector has exactly `LOAD_BYTES` bytes. Loads before the wait for the previous launch support only this size.
    pub loads_now: bool,
}

/// The number of rows in the embedding table, and the distance between the rows.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct TableRows {
    pub rows: u32,
    /// The distance between rows of the table, in vectors.
    pub stride: u32,
}

/// Computes `table[token] · scale`, rounded to the table's dtype, and the norm of this embedding.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn embed_pdl<E: Float, I: Int, N: Size>(
    tokens: &Tensor<I>,
    table: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    embedded: &mut Tensor<Vector<E, N>>,
    normed: &mut Tensor<Vector<E, N>>,
    table_rows: TableRows,
    scalars: NormScalars,
    scale: f32,
    #[comptime] plan: EmbedPlan,
    #[define(E, I)] _elements: [ElemType; 2],
    #[define(N)] _vector: usize,
) {
    let NormScalars {
        rows,
        vectors,
        columns,
        epsilon,
    } = scalars;
    launch_dependents(plan.pdl);
    let computed = comptime!(plan.pdl && !plan.reads_ahead);
    wait_prior_launch(computed);
    mark_volatile(tokens, computed);
    mark_volatile(table, computed);
    mark_volatile(weight, computed);
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
    wait_prior_launch(comptime!(plan.pdl && plan.reads_ahead));

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

/// The scalar factors of per-layer embeddings.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Factors {
    /// The scalar that multiplies the projection, in f32.
    pub projected: f32,
    /// The scalar that multiplies the table's rows. The scaled rows are rounded to the table's dtype.
    pub table: f32,
    /// The scalar that multiplies the sum of the normed projection and the scaled table row, in f32.
    pub sum: f32,
}

/// Computes `(norm(projected · factors.projected) + table[token] · factors.table) · factors.sum` for each layer's columns, in
/// f32. If `tokens` is absent, output row `i` uses row `i` of the table.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn per_layer_pdl<E: Float, I: Int, N: Size>(
    projected: &Tensor<Vector<E, N>>,
    tokens: ComptimeOption<&Tensor<I>>,
    table: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    output: &mut Tensor<Vector<E, N>>,
    table_rows: TableRows,
    factors: Factors,
    scalars: NormScalars,
    layers: u32,
    #[comptime] plan: EmbedPlan,
    #[define(E, I)] _elements: [ElemType; 2],
    #[define(N)] _vector: usize,
) {
    let NormScalars {
        rows,
        vectors,
        columns,
        epsilon,
    } = scalars;
    launch_dependents(plan.pdl);
    let computed = comptime!(plan.pdl && !plan.reads_ahead);
    wait_prior_launch(computed);
    mark_volatile_if_present(tokens, computed);
    mark_volatile(table, computed);
    mark_volatile(weight, computed);
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
    wait_prior_launch(comptime!(plan.pdl && plan.reads_ahead));
    mark_volatile(projected, plan.pdl);
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

/// Returns the offset of a token's table row in vectors. A token beyond the table reads the table's last row.
#[cube]
fn row_of_token<I: Int>(token: I, table: TableRows) -> usize {
    let row = min(u32::cast_from(token), table.rows - 1u32);
    row as usize * table.stride as usize
}
