//! Router kernels for decoding. Two launches route a few rows: [`router_logits_pdl`] and [`top_experts_pdl`].
//!
//! Algorithm: a plane computes one logit of one row, together with the row's norm. Then a cube computes a row's
//! softmax, and the rank of each expert. The experts with a rank below k are the top-k.
//!
//! Tensors: input `[rows, hidden]`, router's matrix `[experts, hidden]`, logits `[rows, experts]` in f32, chosen experts
//! and their weights `[rows, top_k]`.
//!
//! Budget: no shared memory for the logits, and less than 4 KB for the top-k. Registers hold
//! [`LogitsPlan::held`] vectors of the router's matrix and of its scale. A unit requests them before it waits for the
//! previous launch (PDL).
//!
//! Bound: latency. One cube for the whole router's matrix would read 700 KB through one multiprocessor, which takes
//! longer than both launches. Planes recompute the norm, because a barrier takes as long.

use super::kernel::{key, rank};
use crate::op::sums::{Team, cube_max, first_cube_sum, sum_of_squares};
use cube_kit::pdl::{
    launch_dependents, launch_dependents_and_wait, load_now, mark_volatile, wait_prior_launch,
};
use cubecl::prelude::*;

/// The compile-time plan of [`router_logits_pdl`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LogitsPlan {
    pub experts: usize,
    /// The number of units in a plane.
    pub width: usize,
    /// The number of planes per cube. Each plane computes one logit.
    pub planes: usize,
    /// The number of vectors of a row that a unit reads.
    pub held: usize,
    pub pdl: bool,
    /// True if the kernel reads the parameters before it waits for the previous launch.
    pub reads_ahead: bool,
}

impl LogitsPlan {
    /// The number of cubes per row.
    pub fn cubes(self) -> usize {
        self.experts.div_ceil(self.planes)
    }
}

/// Computes the router's logits: the product of the router's matrix with the normalized and scaled row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn router_logits_pdl<E: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    proj: &Tensor<Vector<E, N>>,
    scale: &Tensor<Vector<E, N>>,
    logits: &mut Tensor<f32>,
    vectors: u32,
    columns: f32,
    epsilon: f32,
    #[comptime] plan: LogitsPlan,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    launch_dependents(plan.pdl);
    let computed = comptime!(plan.pdl && !plan.reads_ahead);
    wait_prior_launch(computed);
    mark_volatile(proj, computed);
    mark_volatile(scale, computed);
    let cubes = comptime!(plan.cubes() as u32);
    let row = CUBE_POS as u32 / cubes;
    let expert = CUBE_POS as u32 % cubes * comptime!(plan.planes as u32) + UNIT_POS_Y;
    // A plane without an expert reads the last expert's row instead, so that its loads stay in bounds.
    let start = min(expert, comptime!(plan.experts as u32 - 1)) * vectors;

    let mut weights = Array::<Vector<E, N>>::new(plan.held);
    let mut scales = Array::<Vector<E, N>>::new(plan.held);
    #[unroll]
    for index in 0..plan.held {
        let vector = UNIT_POS_X + comptime!((index * plan.width) as u32);
        if vector < vectors {
            weights[index] = load_now(proj, (start + vector) as usize, plan.reads_ahead);
            scales[index] = load_now(scale, vector as usize, plan.reads_ahead);
        }
    }
    wait_prior_launch(plan.reads_ahead);
    mark_volatile(input, plan.pdl);

    let mut squares = 0.0f32;
    let mut sum = 0.0f32;
    #[unroll]
    for index in 0..plan.held {
        let vector = UNIT_POS_X + comptime!((index * plan.width) as u32);
        if vector < vectors {
            let value = input[(row * vectors + vector) as usize];
            squares += sum_of_squares(value);
            let products = Vector::<f32, N>::cast_from(value)
                * Vector::<f32, N>::cast_from(scales[index])
                * Vector::<f32, N>::cast_from(weights[index]);
            #[unroll]
            for component in 0..products.vector_size().comptime() {
                sum += products.extract(component);
            }
        }
    }
    let mean = plane_sum(squares) / columns;
    let logit = plane_sum(sum) / (mean + epsilon).sqrt() / columns.sqrt();
    if UNIT_POS_X == 0u32 && expert < comptime!(plan.experts as u32) {
        logits[(row * comptime!(plan.experts as u32) + expert) as usize] = logit;
    }
}

/// The compile-time plan of [`top_experts_pdl`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TopPlan {
    pub experts: usize,
    pub top_k: usize,
    /// All units of a cube. There are at least as many units as experts.
    pub team: Team,
    pub pdl: bool,
}

/// Chooses the top-k experts of each row, and computes the weights of their outputs.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn top_experts_pdl<E: Float>(
    logits: &Tensor<f32>,
    per_expert_scale: &Tensor<E>,
    chosen: &mut Tensor<i32>,
    shares: &mut Tensor<f32>,
    #[comptime] plan: TopPlan,
    #[define(E)] _element: ElemType,
) {
    launch_dependents_and_wait(plan.pdl);
    mark_volatile(logits, plan.pdl);
    mark_volatile(per_expert_scale, plan.pdl);
    let experts = comptime!(plan.experts as u32);
    let is_expert = UNIT_POS < experts;
    let row = CUBE_POS as u32;
    // A unit without an expert takes the last expert's logit, which does not change the maximum.
    let expert = min(UNIT_POS, experts - 1u32);
    let logit = logits[(row * experts + expert) as usize];
    let scale = f32::cast_from(per_expert_scale[expert as usize]);

    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.team.parts()));
    let mut partial_sums = Shared::<[f32]>::new_slice(comptime!(plan.team.parts()));
    let mut keys = Shared::<[u32]>::new_slice(plan.experts);
    let mut of_rank = Shared::<[f32]>::new_slice(plan.top_k);
    let largest = cube_max(logit, &mut partial, plan.team);
    let power = select(is_expert, (logit - largest).exp(), 0.0f32);
    let probability = power / first_cube_sum(power, &mut partial_sums, plan.team);
    if is_expert {
        keys[expert as usize] = key(probability);
    }
    sync_cube();
    let rank = rank(&keys, expert, plan.experts);
    let is_chosen = is_expert && rank < comptime!(plan.top_k as u32);
    if is_chosen {
        of_rank[rank as usize] = probability;
    }
    sync_cube();
    if is_chosen {
        let mut of_all = 0.0f32;
        #[unroll]
        for index in 0..plan.top_k {
            of_all += of_rank[index];
        }
        let at = (row * comptime!(plan.top_k as u32) + rank) as usize;
        chosen[at] = i32::cast_from(expert);
        shares[at] = probability / of_all * scale;
    }
}
