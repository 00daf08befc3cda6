//! What the kernels of a few rows have in common: how products are divided, and what becomes of the units' sums.

use crate::op::sums::{Team, part_of_sum};
use cubecl::prelude::*;

/// How the product is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ProjectPlan {
    /// Rows of the input.
    pub rows: usize,
    /// Outputs of a team.
    pub outputs: usize,
    /// Whether there are two matrices, of which one opens the other's gates.
    pub gated: bool,
    pub team: Team,
    /// Teams of a cube.
    pub teams: usize,
    /// Experts whose inner dimensions lie one after the other in that of an item; 0 without experts.
    pub ranks: usize,
    /// Matrices whose outputs lie side by side.
    pub sides: usize,
    /// Vectors of each weight row that a unit has in flight. The inner dimension is a multiple of what a team reads at
    /// once, or this is 1.
    pub unroll: usize,
    /// Whether the kernel takes part in [`overlap`](cube_kit::overlap).
    pub overlaps: bool,
    /// Whether it reads weights before it waits: no launch writes them.
    pub reads_ahead: bool,
}

impl ProjectPlan {
    /// Weight rows of a team.
    pub fn weights(self) -> usize {
        self.outputs * if self.gated { 2 } else { 1 }
    }

    /// Sums of a team.
    pub fn sums(self) -> usize {
        self.rows * self.weights()
    }

    /// Floats of shared memory.
    pub fn partials(self) -> usize {
        self.teams * self.sums() * self.team.parts()
    }
}

/// What happens to the sums, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Epilogue {
    /// GELU.
    pub gelu: bool,
    /// `cap · tanh(x / cap)`.
    pub capped: bool,
}

/// Where a factor of the output lies: `factor[r · stride + start + o]`.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(super) struct FactorPlace {
    pub start: u32,
    pub stride: u32,
}

/// The outputs of a team.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Outputs {
    /// The first row of the output.
    pub row: u32,
    pub first: u32,
    /// Of the matrix.
    pub outputs: u32,
    /// Where they begin in a row.
    pub column: u32,
    /// Of a row.
    pub all_outputs: u32,
    pub factor_place: FactorPlace,
    pub cap: f32,
}

/// Adds up what a team's units have, and writes what the epilogue makes of it. Syncs.
#[cube]
pub(super) fn finish<E: Float>(
    sums: Array<f32>,
    factor: &ComptimeOption<&Tensor<E>>,
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
    finish_parts(&partial, factor, output, of_outputs, plan, epilogue);
}

/// Adds up a team's parts, which lie together, those of one sum next to each other, and writes what the epilogue makes of the sums. Syncs first.
#[cube]
pub(super) fn finish_parts<E: Float>(
    partial: &Shared<[f32]>,
    factor: &ComptimeOption<&Tensor<E>>,
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
    let cap = of_outputs.cap;
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
            #[unroll]
            for part in 0..parts {
                value += partial[from + part];
            }
            if comptime!(epilogue.gelu) {
                value = gelu(value);
            }
            if comptime!(plan.gated) {
                let mut through = 0.0f32;
                #[unroll]
                for part in 0..parts {
                    through += partial[from + comptime!(plan.outputs * plan.team.parts()) + part];
                }
                value *= through;
            }
            #[comptime]
            match factor {
                ComptimeOption::Some(factor) => {
                    let at = row * of_outputs.factor_place.stride as usize
                        + of_outputs.factor_place.start as usize
                        + column;
                    value *= f32::cast_from(factor[at]);
                }
                ComptimeOption::None => {}
            }
            if comptime!(epilogue.capped) {
                value = cap * (value / cap).tanh();
            }
            let row = of_outputs.row as usize + row;
            let to = row * of_outputs.all_outputs as usize + of_outputs.column as usize + column;
            output[to] = E::cast_from(value);
        }
        item += comptime!(plan.team.units as u32);
    }
}

/// GELU by its approximation through tanh.
#[cube]
fn gelu(x: f32) -> f32 {
    let inner = (x + 0.044_715f32 * x * x * x) * 0.797_884_6f32;
    // Drivers may compute tanh through exponentials that overflow; it is 1 long before.
    let inner = max(min(inner, 20.0f32), -20.0f32);
    0.5f32 * x * (1.0f32 + inner.tanh())
}
