//! Common code of the GEMV kernels: the division of the work, and the epilogue that turns the units' partial sums into
//! outputs.
//!
//! A team is a group of units that computes a few outputs together. A part is a partial sum in shared memory.

use crate::op::sums::{Team, part_of_sum};
use cubecl::prelude::*;

/// The number of banks of shared memory. Units of a warp that access different words of a bank wait for each other.
const BANKS: usize = 32;

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
    let part = lane / comptime!(plan.team.width as u32);
    #[unroll]
    for index in 0..comptime!(plan.sums()) {
        let sum = part_of_sum(sums[index], plan.team);
        if lane.is_multiple_of(comptime!(plan.team.width as u32)) {
            let row = comptime!((index / plan.weights()) as u32).runtime();
            let weight = comptime!((index % plan.weights()) as u32).runtime();
            partial[place_of_part(part, row, weight, plan)] = sum;
        }
    }
    finish_parts(&partial, inputs, output, of_outputs, plan, epilogue);
}

/// Returns the position, in shared memory, of a partial sum of the unit's team: the sum of one part for an input row
/// and one of the team's weight rows.
///
/// The position avoids bank conflicts. The units of a warp write the sums of 8 input rows and 8 weight rows, and the
/// rows of one part are contiguous. If the rows of 8 inputs would fall into the same banks, the index of the weight row
/// is permuted: at most two units of a warp then share a bank.
#[cube]
pub(super) fn place_of_part(
    part: u32,
    row: u32,
    weight: u32,
    #[comptime] plan: ProjectPlan,
) -> usize {
    let weights = comptime!(plan.weights());
    let eights = comptime!(weights / 8);
    let mut place = weight;
    if comptime!(eights > 1 && weights.is_power_of_two() && weights <= BANKS) {
        let turn = row / comptime!((BANKS / weights) as u32) % comptime!(eights as u32);
        place = weight ^ (8u32 * turn);
    }
    let of_team = UNIT_POS_Y * comptime!(plan.team.parts() as u32) + part;
    (of_team * comptime!(plan.sums() as u32) + row * comptime!(weights as u32) + place) as usize
}

/// Adds up the partial sums of all parts of the unit's team, for an input row and one of the team's weight rows.
#[cube]
pub(super) fn sum_of_parts(
    partial: &Shared<[f32]>,
    row: u32,
    weight: u32,
    #[comptime] plan: ProjectPlan,
) -> f32 {
    let from = place_of_part(0u32, row, weight, plan);
    let mut sum = 0.0f32;
    #[unroll]
    for part in 0..comptime!(plan.team.parts()) {
        sum += partial[from + comptime!(part * plan.sums())];
    }
    sum
}

/// Adds up a team's partial sums in shared memory, applies the epilogue, and writes the outputs. Synchronizes the cube
/// first.
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
    let first = of_outputs.first;
    let outputs = of_outputs.outputs;
    let of_row = comptime!(plan.outputs as u32);
    let mut item = UNIT_POS_X;
    while item < comptime!((plan.rows * plan.outputs) as u32) {
        let row = item / of_row;
        let o = item % of_row;
        let column = (first + o) as usize;
        if column < outputs as usize {
            let value = sum_of_parts(partial, row, o, plan);
            let mut through = 0.0f32;
            if comptime!(plan.gated) {
                through = sum_of_parts(partial, row, o + of_row, plan);
            }
            let row = (of_outputs.row + row) as usize;
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
