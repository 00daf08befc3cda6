//! MoE router kernels. `route` computes a row's norm, logits, softmax and top-k experts, and the weights of the
//! experts' outputs. `choose` only computes the top-k of given probabilities.
//!
//! Algorithm: each group of units computes the logits of several experts at a time. The rank of an expert is the number
//! of experts before it in descending order of probability. The experts with a rank below k are the top-k.
//!
//! Budget: less than 30 KB of shared memory. Registers hold a vector of each row of the cube, [`RoutePlan::at_once`]
//! sums for each row, and a vector of the router's matrix.
//!
//! Schedule: a cube processes [`RoutePlan::rows`] rows in prompts. On devices with planes, [`few_rows`](super::few_rows)
//! has the kernels of decoding; on other devices a cube processes one row. The router's matrix has a
//! few hundred KB. The first cube reads the matrix from memory, and all other cubes read it from the L2 cache. Bound:
//! latency in decoding; in prompts the L2 cache and the units' arithmetic.

use crate::op::sums::{Team, cube_sum, part_of_sum, sum_of_squares};
use cubecl::prelude::*;

/// The division of the logits among teams of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RoutePlan {
    pub experts: usize,
    pub top_k: usize,
    /// The units that together compute a logit.
    pub team: Team,
    pub teams: usize,
    /// The number of experts whose logits a team of units computes at the same time.
    pub at_once: usize,
    /// The number of rows per cube. The rows share each read of the router's matrix.
    pub rows: usize,
}

impl RoutePlan {
    /// Returns a team that consists of all units in the cube.
    pub fn cube(self) -> Team {
        Team {
            units: self.team.units * self.teams,
            width: self.team.width,
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn route<E: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    proj: &Tensor<Vector<E, N>>,
    scale: &Tensor<Vector<E, N>>,
    per_expert_scale: &Tensor<E>,
    chosen: &mut Tensor<i32>,
    shares: &mut Tensor<f32>,
    rows: u32,
    vectors: u32,
    columns: f32,
    epsilon: f32,
    #[comptime] plan: RoutePlan,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let first_row = CUBE_POS as u32 * comptime!(plan.rows as u32);
    let units = comptime!(plan.cube().units as u32);
    let experts = comptime!(plan.experts as u32);
    let parts = comptime!(plan.team.parts());

    let mut of_cube = Shared::<[f32]>::new_slice(comptime!(plan.cube().parts()));
    let mut factors = Array::<f32>::new(comptime!(plan.rows));
    let mut starts = Array::<usize>::new(comptime!(plan.rows));
    #[unroll]
    for r in 0..plan.rows {
        // If fewer than `plan.rows` rows are left for this cube, load the last row again in place of the missing rows,
        // so that all loads stay in bounds.
        let start = min(first_row + comptime!(r as u32), rows - 1u32) as usize * vectors as usize;
        let mut squares = 0.0f32;
        let mut vector = UNIT_POS;
        while vector < vectors {
            squares += sum_of_squares(input[start + vector as usize]);
            vector += units;
        }
        let mean = cube_sum(squares, &mut of_cube, comptime!(plan.cube())) / columns;
        starts[r] = start;
        factors[r] = 1.0f32 / (mean + epsilon).sqrt() / columns.sqrt();
    }

    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.rows * plan.experts * parts));
    let lane = UNIT_POS_X;
    let mut first = UNIT_POS_Y * comptime!(plan.at_once as u32);
    let mut sums = Array::<f32>::new(comptime!(plan.at_once * plan.rows));
    let mut x = Array::<Vector<f32, N>>::new(comptime!(plan.rows));
    while first < experts {
        #[unroll]
        for sum in 0..comptime!(plan.at_once * plan.rows) {
            sums[sum] = 0.0f32;
        }
        let mut vector = lane;
        while vector < vectors {
            let scale = Vector::<f32, N>::cast_from(scale[vector as usize]);
            #[unroll]
            for r in 0..plan.rows {
                x[r] = Vector::<f32, N>::cast_from(input[starts[r] + vector as usize]) * scale;
            }
            #[unroll]
            for o in 0..plan.at_once {
                // If the team of units has no expert left, load the matrix row of the last expert, so that the load
                // stays in bounds. The result is not written.
                let expert = min(first + comptime!(o as u32), experts - 1u32);
                let at = expert as usize * vectors as usize + vector as usize;
                let weights = Vector::<f32, N>::cast_from(proj[at]);
                #[unroll]
                for r in 0..plan.rows {
                    let products = x[r] * weights;
                    let mut sum = sums[comptime!(o * plan.rows + r)];
                    #[unroll]
                    for component in 0..products.vector_size().comptime() {
                        sum += products.extract(component);
                    }
                    sums[comptime!(o * plan.rows + r)] = sum;
                }
            }
            vector += comptime!(plan.team.units as u32);
        }
        #[unroll]
        for o in 0..plan.at_once {
            let expert = first + comptime!(o as u32);
            #[unroll]
            for r in 0..plan.rows {
                let sum = sums[comptime!(o * plan.rows + r)];
                let part = part_of_sum(sum, comptime!(plan.team));
                if expert < experts && lane.is_multiple_of(comptime!(plan.team.width as u32)) {
                    let at = (lane / comptime!(plan.team.width as u32)) as usize;
                    let of_row = comptime!(r * plan.experts * parts);
                    partial[of_row + expert as usize * parts + at] = part;
                }
            }
        }
        first += comptime!((plan.teams * plan.at_once) as u32);
    }
    sync_cube();

    let mut numbers = Shared::<[f32]>::new_slice(comptime!(plan.experts));
    let mut keys = Shared::<[u32]>::new_slice(comptime!(plan.experts));
    let mut of_rank = Shared::<[u32]>::new_slice(comptime!(plan.top_k));
    #[unroll]
    for r in 0..plan.rows {
        let row = first_row + comptime!(r as u32);
        let mut expert = UNIT_POS;
        while expert < experts {
            let mut logit = 0.0f32;
            #[unroll]
            for part in 0..parts {
                let of_row = comptime!(r * plan.experts * parts + part);
                logit += partial[of_row + expert as usize * parts];
            }
            numbers[expert as usize] = logit * factors[r];
            expert += units;
        }
        softmax_in_place(&mut numbers, &mut keys, plan);

        let mut expert = UNIT_POS;
        while expert < experts {
            let rank = rank(&keys, expert, comptime!(plan.experts));
            if rank < comptime!(plan.top_k as u32) {
                of_rank[rank as usize] = expert;
            }
            expert += units;
        }
        sync_cube();
        let mut rank = UNIT_POS;
        while rank < comptime!(plan.top_k as u32) && row < rows {
            let mut of_all = 0.0f32;
            for index in 0..comptime!(plan.top_k) {
                of_all += numbers[of_rank[index] as usize];
            }
            let expert = of_rank[rank as usize];
            let at = row as usize * comptime!(plan.top_k) + rank as usize;
            chosen[at] = i32::cast_from(expert);
            shares[at] = numbers[expert as usize] / of_all
                * f32::cast_from(per_expert_scale[expert as usize]);
            rank += units;
        }
        // Wait until all units have read the probabilities and ranks, before the next row overwrites them.
        if comptime!(r + 1 < plan.rows) {
            sync_cube();
        }
    }
}

/// Replaces the logits in `numbers` by their softmax probabilities. Writes integer `keys` that compare as the
/// probabilities do. Synchronizes the cube before and after.
#[cube]
fn softmax_in_place(
    numbers: &mut Shared<[f32]>,
    keys: &mut Shared<[u32]>,
    #[comptime] plan: RoutePlan,
) {
    let units = comptime!(plan.cube().units as u32);
    let experts = comptime!(plan.experts as u32);
    sync_cube();
    let mut largest = numbers[0];
    for index in 1..comptime!(plan.experts) {
        largest = max(largest, numbers[index]);
    }
    sync_cube();
    let mut expert = UNIT_POS;
    while expert < experts {
        numbers[expert as usize] = (numbers[expert as usize] - largest).exp();
        expert += units;
    }
    sync_cube();
    let mut sum = 0.0f32;
    for index in 0..comptime!(plan.experts) {
        sum += numbers[index];
    }
    sync_cube();
    let mut expert = UNIT_POS;
    while expert < experts {
        let probability = numbers[expert as usize] / sum;
        numbers[expert as usize] = probability;
        keys[expert as usize] = key(probability);
        expert += units;
    }
    sync_cube();
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn choose(
    probabilities: &Tensor<f32>,
    chosen: &mut Tensor<i32>,
    rows: u32,
    #[comptime] experts: usize,
    #[comptime] top_k: usize,
    #[comptime] units: usize,
) {
    if CUBE_POS >= rows as usize {
        terminate!();
    }
    let mut keys = Shared::<[u32]>::new_slice(experts);
    let mut expert = UNIT_POS;
    while expert < comptime!(experts as u32) {
        keys[expert as usize] = key(probabilities[CUBE_POS * experts + expert as usize]);
        expert += comptime!(units as u32);
    }
    sync_cube();
    let mut expert = UNIT_POS;
    while expert < comptime!(experts as u32) {
        let rank = rank(&keys, expert, experts);
        if rank < comptime!(top_k as u32) {
            chosen[CUBE_POS * top_k + rank as usize] = i32::cast_from(expert);
        }
        expert += comptime!(units as u32);
    }
}

/// Maps floats to integers that compare as the floats do in `f32::total_cmp`, which also orders NaN.
#[cube]
pub(super) fn key(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let sign = comptime!(1u32 << 31);
    select(bits < sign, bits | sign, !bits)
}

/// Returns the rank of an expert: the number of experts with a larger key, or with an equal key and a smaller index.
/// `keys` are integers that compare as the probabilities do.
#[cube]
pub(super) fn rank(keys: &Shared<[u32]>, expert: u32, #[comptime] experts: usize) -> u32 {
    let own = keys[expert as usize];
    let mut rank = 0u32;
    for index in 0..comptime!(experts as u32) {
        let other = keys[index as usize];
        let before = other > own || (other == own && index < expert);
        rank += select(before, 1u32, 0u32);
    }
    rank
}
