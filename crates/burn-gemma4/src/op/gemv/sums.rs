//! Common code of the GEMV kernels: the division of the work, and the epilogue that turns the units' partial sums into
//! outputs.
//!
//! A team is a group of units that computes a few outputs together. A part is a partial sum in shared memory.

use crate::op::sums::{Team, part_of_sum};
use cubecl::prelude::*;

/// The division of a GEMV among teams. A team is a group of units that computes a few outputs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ProjectPlan {
    /// The number of input rows.
    pub rows: usize,
    /// The number of outputs that a team of units computes for each input row.
    pub outputs: usize,
    /// True for GeGLU: the GELU of the first matrix's output multiplies the second matrix's output.
    pub gated: bool,
    pub team: Team,
    /// The number of teams in a cube. A team is a group of units that computes outputs together.
    pub teams: usize,
    /// The number of experts by whose matrices a work item multiplies; 0 without experts. With experts, a work item is
    /// a row or a (row, chosen expert) pair: see [`experts`](super::experts).
    pub ranks: usize,
    /// The number of concatenated matrices.
    pub sides: usize,
    /// The number of vectors of each weight row that a unit keeps in flight.
    pub unroll: usize,
    /// True if some vectors in flight may lie beyond the end of a row. A unit then loads the row's last vector instead,
    /// and leaves its product out of the sum. This is so if `unroll · team.units` does not divide the row's vectors.
    pub is_padded: bool,
    /// True if the kernel uses programmatic dependent launch ([`pdl`](cube_kit::pdl)).
    pub pdl: bool,
    /// True if the kernel reads weights before it waits for the previous launch. No launch may write these weights.
    pub reads_ahead: bool,
}

impl ProjectPlan {
    /// The number of outputs that a cube computes for each input row.
    pub fn cube_outputs(self) -> usize {
        self.outputs * self.teams
    }

    /// The number of weight rows that a team of units multiplies by.
    pub fn weights(self) -> usize {
        self.outputs * if self.gated { 2 } else { 1 }
    }

    /// The number of sums that a team of units computes.
    pub fn sums(self) -> usize {
        self.rows * self.weights()
    }

    /// The number of f32 partial sums in shared memory. Shared memory holds the partial sums of all teams of units in a
    /// cube.
    pub fn partials(self) -> usize {
        self.teams * self.sums() * self.team.parts()
    }
}

/// Returns `vector`, or the row's last vector if `vector` lies beyond the end of the row.
#[cube]
pub(super) fn vector_in_row(vector: u32, vectors: u32, #[comptime] plan: ProjectPlan) -> u32 {
    if comptime!(plan.is_padded) {
        min(vector, vectors - 1u32)
    } else {
        vector
    }
}

/// Returns `sum`, or 0 if `vector` lies beyond the end of the row.
#[cube]
pub(super) fn sum_in_row(
    sum: f32,
    vector: u32,
    vectors: u32,
    #[comptime] plan: ProjectPlan,
) -> f32 {
    if comptime!(plan.is_padded) {
        select(vector < vectors, sum, 0.0f32)
    } else {
        sum
    }
}

/// The operations on the final sums, in the order in which they are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Epilogue {
    /// True if the epilogue applies GELU.
    pub gelu: bool,
    /// True if the epilogue applies the soft cap `cap · tanh(x / cap)`.
    pub capped: bool,
}

/// The position, within the factor tensor, of the factors that multiply the outputs. The factor
/// `factor[r · stride + start + o]` multiplies output `o` of row `r`.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(super) struct FactorPlace {
    pub start: u32,
    pub stride: u32,
}

/// The inputs of the epilogue.
#[derive(CubeLaunch, CubeType)]
pub(super) struct EpilogueInputs<E: Float> {
    /// The tensor that multiplies the outputs element by element, `[rows, columns]`.
    pub factor: ComptimeOption<OwnedTensor<E>>,
    pub factor_place: FactorPlace,
    /// The soft cap. Only a capped [`Epilogue`] applies the cap.
    pub cap: f32,
}

/// The position of the outputs that a team of units computes.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Outputs {
    /// The first output row that the team of units writes.
    pub row: u32,
    /// The first output that the team of units computes, as an index among the outputs of the team's matrix.
    pub first: u32,
    /// The number of outputs of the team's matrix, which is the matrix by which the team of units multiplies.
    pub outputs: u32,
    /// The column of the output tensor at which the outputs of the team's matrix begin.
    pub column: u32,
    /// The number of columns of the output tensor, which concatenates the outputs of all matrices.
    pub all_outputs: u32,
}

/// Reduces the partial sums of a team of units, applies the epilogue, and writes the outputs. Synchronizes the cube.
#[cube]
pub(super) fn finish<E: Float>(
    sums: Array<f32>,
    inputs: &EpilogueInputs<E>,
    output: &mut Tensor<E>,
    of_outputs: Outputs,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
) {
    let lane = UNIT_POS_X;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.partials()));
    let of_team = UNIT_POS_Y as usize * comptime!(plan.sums() * plan.team.parts());
    #[unroll]
    for index in 0..comptime!(plan.sums()) {
        let part = part_of_sum(sums[index], plan.team);
        if lane.is_multiple_of(comptime!(plan.team.width as u32)) {
            let at = (lane / comptime!(plan.team.width as u32)) as usize;
            partial[of_team + comptime!(index * plan.team.parts()) + at] = part;
        }
    }
    finish_parts(&partial, inputs, output, of_outputs, plan, epilogue);
}

/// Adds up a team's partial sums in shared memory, applies the epilogue, and writes the outputs. The partial sums of
/// one output are contiguous. Synchronizes the cube first.
#[cube]
pub(super) fn finish_parts<E: Float>(
    partial: &Shared<[f32]>,
    inputs: &EpilogueInputs<E>,
    output: &mut Tensor<E>,
    of_outputs: Outputs,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
) {
    sync_cube();
    let lane = UNIT_POS_X;
    let team = UNIT_POS_Y;
    let first = of_outputs.first;
    let outputs = of_outputs.outputs;
    let parts = comptime!(plan.team.parts());
    let of_team = team as usize * comptime!(plan.sums() * plan.team.parts());
    let mut item = lane;
    while item < comptime!((plan.rows * plan.outputs) as u32) {
        let row = item as usize / plan.outputs;
        let o = item as usize % plan.outputs;
        let column = first as usize + o;
        if column < outputs as usize {
            let from = of_team + (row * comptime!(plan.weights()) + o) * parts;
            let mut value = 0.0f32;
            let mut through = 0.0f32;
            #[unroll]
            for part in 0..parts {
                value += partial[from + part];
            }
            if comptime!(plan.gated) {
                #[unroll]
                for part in 0..parts {
                    through += partial[from + comptime!(plan.outputs * plan.team.parts()) + part];
                }
            }
            let row = of_outputs.row as usize + row;
            let value =
                apply_epilogue::<E>(value, through, inputs, row, column, plan.gated, epilogue);
            let to = row * of_outputs.all_outputs as usize + of_outputs.column as usize + column;
            output[to] = E::cast_from(value);
        }
        item += comptime!(plan.team.units as u32);
    }
}

/// Applies the epilogue to one output. `sum` is the output's sum for the first matrix. If `gated`, `through` is the sum
/// for the second matrix, and the GELU of `sum` multiplies `through`. `row` and `column` are the output's row, and its
/// index among the outputs of its matrix.
#[cube]
pub(super) fn apply_epilogue<E: Float>(
    sum: f32,
    through: f32,
    inputs: &EpilogueInputs<E>,
    row: usize,
    column: usize,
    #[comptime] gated: bool,
    #[comptime] epilogue: Epilogue,
) -> f32 {
    let mut value = sum;
    if comptime!(epilogue.gelu) {
        value = gelu(value);
    }
    if comptime!(gated) {
        value *= through;
    }
    #[comptime]
    match &inputs.factor {
        ComptimeOption::Some(factor) => {
            let at = row * inputs.factor_place.stride as usize
                + inputs.factor_place.start as usize
                + column;
            value *= f32::cast_from(factor[at]);
        }
        ComptimeOption::None => {}
    }
    if comptime!(epilogue.capped) {
        let cap = inputs.cap;
        value = cap * (value / cap).tanh();
    }
    value
}

/// Computes GELU by its tanh approximation.
#[cube]
pub(super) fn gelu(x: f32) -> f32 {
    let inner = (x + 0.044_715f32 * x * x * x) * 0.797_884_6f32;
    // Clamp the argument of tanh to ±20, because drivers may compute tanh through exponentials that overflow.
    let inner = max(min(inner, 20.0f32), -20.0f32);
    0.5f32 * x * (1.0f32 + inner.tanh())
}
