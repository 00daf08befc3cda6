//! A few rows times the transpose of a weight matrix: `output[r, o] = Σ input[r, i] · weight[o, i]`, in f32.
//!
//! Budget: `sums` floats a part of each team in shared memory, at most 8 KB; `rows · weights` sums and `unroll · weights`
//! vectors in registers, at most 32 and 8. Bound by memory: every weight is read once, by 16 bytes a unit, several of
//! them in flight; the rows are read from the cache by every team. A team's units lie along the inner dimension of a few
//! outputs, all rows of which it computes, so that one read of a weight serves them all.

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
    /// Vectors of each weight row that a unit has in flight. The inner dimension is a multiple of what a team reads at
    /// once, or this is 1.
    pub unroll: usize,
}

impl ProjectPlan {
    /// Weight rows of a team.
    fn weights(self) -> usize {
        self.outputs * if self.gated { 2 } else { 1 }
    }

    /// Sums of a team.
    fn sums(self) -> usize {
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

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project<E: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    through: ComptimeOption<&Tensor<Vector<E, N>>>,
    factor: ComptimeOption<&Tensor<E>>,
    output: &mut Tensor<E>,
    factor_place: FactorPlace,
    vectors: u32,
    weight_stride: u32,
    through_stride: u32,
    outputs: u32,
    cap: f32,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let lane = UNIT_POS_X;
    let team = UNIT_POS_Y;
    let first =
        (CUBE_POS as u32 * comptime!(plan.teams as u32) + team) * comptime!(plan.outputs as u32);

    let mut sums = Array::<f32>::new(comptime!(plan.sums()));
    #[unroll]
    for index in 0..comptime!(plan.sums()) {
        sums[index] = 0.0f32;
    }
    let mut loaded = Array::<Vector<E, N>>::new(comptime!(plan.unroll * plan.weights()));
    let mut vector = lane;
    while vector < vectors {
        #[unroll]
        for ahead in 0..plan.unroll {
            let at = (vector + comptime!((ahead * plan.team.units) as u32)) as usize;
            #[unroll]
            for o in 0..plan.outputs {
                // Beyond the last output, the last one again, which nobody writes.
                let row = min(first + comptime!(o as u32), outputs - 1u32) as usize;
                loaded[comptime!(ahead * plan.weights() + o)] =
                    weight[row * weight_stride as usize + at];
                #[comptime]
                match &through {
                    ComptimeOption::Some(through) => {
                        loaded[comptime!(ahead * plan.weights() + plan.outputs + o)] =
                            through[row * through_stride as usize + at];
                    }
                    ComptimeOption::None => {}
                }
            }
        }
        #[unroll]
        for ahead in 0..plan.unroll {
            let at = (vector + comptime!((ahead * plan.team.units) as u32)) as usize;
            #[unroll]
            for r in 0..plan.rows {
                let x = Vector::<f32, N>::cast_from(input[r * vectors as usize + at]);
                #[unroll]
                for w in 0..comptime!(plan.weights()) {
                    let of_weight =
                        Vector::<f32, N>::cast_from(loaded[comptime!(ahead * plan.weights() + w)]);
                    let products = x * of_weight;
                    let mut sum = sums[comptime!(r * plan.weights() + w)];
                    #[unroll]
                    for component in 0..x.vector_size().comptime() {
                        sum += products.extract(component);
                    }
                    sums[comptime!(r * plan.weights() + w)] = sum;
                }
            }
        }
        vector += comptime!((plan.unroll * plan.team.units) as u32);
    }

    // A team's parts lie together, those of one sum next to each other.
    let parts = comptime!(plan.team.parts());
    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.partials()));
    let of_team = team as usize * comptime!(plan.sums() * plan.team.parts());
    #[unroll]
    for index in 0..comptime!(plan.sums()) {
        let part = part_of_sum(sums[index], plan.team);
        if lane.is_multiple_of(comptime!(plan.team.width as u32)) {
            let at = (lane / comptime!(plan.team.width as u32)) as usize;
            partial[of_team + comptime!(index * plan.team.parts()) + at] = part;
        }
    }
    sync_cube();

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
            match &factor {
                ComptimeOption::Some(factor) => {
                    let at =
                        row * factor_place.stride as usize + factor_place.start as usize + column;
                    value *= f32::cast_from(factor[at]);
                }
                ComptimeOption::None => {}
            }
            if comptime!(epilogue.capped) {
                value = cap * (value / cap).tanh();
            }
            output[row * outputs as usize + column] = E::cast_from(value);
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
