//! The clustered LM head of a drafter. The first kernel chooses the `top_k` groups of tokens with the largest scores. The
//! second kernel finds the most likely token among the tokens of these groups.
//!
//! Algorithm: a group's rank is the number of groups that precede it in descending order of scores. Many cubes count
//! the ranks in parallel, which is faster than a sort in one cube.
//!
//! Budget: at most 12 KB of shared memory. Registers hold a score and its rank in the first kernel, and [`AT_ONCE`] sums
//! and tokens in the second.
//!
//! Schedule: in the first kernel every cube reads all scores of a row, a few KB. The second kernel reads a few MB of the
//! LM head's weights, with vectors of [`AT_ONCE`] rows in flight per unit.
//!
//! Bound: latency. The second kernel has three dependent reads: the group, its token, and the token's row of weights.

use crate::op::argmax::kernel::bring_best_first;
use crate::op::sums::{Team, part_of_sum};
use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile};
use cubecl::prelude::*;

/// The number of scores that a cube ranks. For each of these scores, `SHARES` units divide the comparisons with all
/// scores of the row among themselves. Neither `OWN` nor `SHARES` has been tuned yet.
pub(super) const OWN: usize = 16;
const SHARES: usize = 16;

/// The number of units in a cube of `choose_groups_pdl`.
pub(super) const CHOOSING_UNITS: usize = OWN * SHARES;

/// The number of scores that shared memory holds at a time.
const STRETCH: usize = 2048;

/// The number of rows of the LM head that a unit reads at once to compute dot products. The number has not been tuned yet.
pub(super) const AT_ONCE: usize = 4;

/// Chooses for each row the `top_k` groups with the largest scores, in descending order. On ties the lower index comes
/// first. NaN counts as the smallest score.
#[cube(launch_unchecked)]
pub(super) fn choose_groups_pdl<E: Float, I: Int>(
    scores: &Tensor<E>,
    chosen: &mut Tensor<I>,
    start: u32,
    stride: u32,
    groups: u32,
    top_k: u32,
    cubes_of_row: u32,
    #[comptime] pdl: bool,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    launch_dependents_and_wait(pdl);
    mark_volatile(scores, pdl);
    let row = CUBE_POS as u32 / cubes_of_row;
    let share = UNIT_POS % comptime!(SHARES as u32);
    let place = UNIT_POS / comptime!(SHARES as u32);
    let own = CUBE_POS as u32 % cubes_of_row * comptime!(OWN as u32) + place;
    let first = row * stride + start;
    let own_score = score_of(scores, first, min(own, groups - 1u32));
    let mut others = Shared::<[f32]>::new_slice(STRETCH);
    let mut before = 0u32;
    let mut behind = 0u32;
    while behind < groups {
        // Wait until all units have read the previous `STRETCH` scores in shared memory, before the loads below overwrite
        // the scores.
        sync_cube();
        let count = min(groups - behind, comptime!(STRETCH as u32));
        let mut at = UNIT_POS;
        while at < count {
            others[at as usize] = score_of(scores, first, behind + at);
            at += comptime!(CHOOSING_UNITS as u32);
        }
        sync_cube();
        let mut at = share;
        while at < count {
            let other = others[at as usize];
            let is_first = other == own_score && behind + at < own;
            before += select(other > own_score || is_first, 1u32, 0u32);
            at += comptime!(SHARES as u32);
        }
        behind += comptime!(STRETCH as u32);
    }
    let mut counted = Shared::<[u32]>::new_slice(CHOOSING_UNITS);
    counted[UNIT_POS as usize] = before;
    sync_cube();
    if share == 0u32 && own < groups {
        let mut rank = 0u32;
        #[unroll]
        for other in 0..SHARES {
            rank += counted[UNIT_POS as usize + other];
        }
        if rank < top_k {
            chosen[(row * top_k + rank) as usize] = I::cast_from(own);
        }
    }
}

/// Returns a group's score, with NaN replaced by the smallest f32.
#[cube]
fn score_of<E: Float>(scores: &Tensor<E>, first: u32, group: u32) -> f32 {
    let score = f32::cast_from(scores[(first + group) as usize]);
    let least = f32::new(f32::MIN);
    select(score > least, score, least)
}

/// The sizes of the groups of tokens, and the layout of the rows in the LM head's weight table.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Candidates {
    /// The number of tokens in a group.
    pub of_group: u32,
    /// The number of chosen groups per row.
    pub groups: u32,
    /// The number of vectors in a row of the LM head's weight table.
    pub vectors: u32,
    /// The stride of the rows in the LM head's weight table, in vectors.
    pub table_stride: u32,
    pub cubes_of_row: u32,
}

/// The compile-time plan of the search among candidate tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CandidatesPlan {
    /// The number and the arrangement of the units that compute a logit together.
    pub team: Team,
    /// The number of teams per cube. A team consists of the units that compute a logit together.
    pub teams: usize,
    pub pdl: bool,
}

/// Finds the largest logit among the tokens of a row's chosen groups, and the token of this logit. The cubes of a row
/// divide these tokens among themselves, and each cube writes the result for its own part. A logit is the dot product
/// of the hidden row and the token's row of weights. On ties the smallest token id wins. The token is −1 if no logit is
/// above −∞.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn argmax_candidates_pdl<E: Float, I: Int, N: Size>(
    hidden: &Tensor<Vector<E, N>>,
    table: &Tensor<Vector<E, N>>,
    ordering: &Tensor<I>,
    chosen: &Tensor<I>,
    largest: &mut Tensor<f32>,
    tokens_of_largest: &mut Tensor<I>,
    candidates: Candidates,
    #[comptime] plan: CandidatesPlan,
    #[define(E, I)] _elements: [ElemType; 2],
    #[define(N)] _vector: usize,
) {
    let (team, teams) = comptime!((plan.team, plan.teams));
    launch_dependents_and_wait(plan.pdl);
    mark_volatile(hidden, plan.pdl);
    mark_volatile(table, plan.pdl);
    mark_volatile(ordering, plan.pdl);
    mark_volatile(chosen, plan.pdl);
    let row = CUBE_POS as u32 / candidates.cubes_of_row;
    let part = CUBE_POS as u32 % candidates.cubes_of_row;
    let lane = UNIT_POS % comptime!(team.units as u32);
    let of_cube = UNIT_POS / comptime!(team.units as u32);
    let last = candidates.of_group * candidates.groups - 1u32;
    let mut tokens = Array::<u32>::new(AT_ONCE);
    #[unroll]
    for index in 0..AT_ONCE {
        let candidate = (part * comptime!(AT_ONCE as u32) + comptime!(index as u32))
            * comptime!(teams as u32)
            + of_cube;
        // If no candidate token is left, process the row's last candidate again, because a repeated candidate does not
        // change the maximum.
        let candidate = min(candidate, last);
        let rank = candidate / candidates.of_group;
        let group = u32::cast_from(chosen[(row * candidates.groups + rank) as usize]);
        let at = group * candidates.of_group + candidate % candidates.of_group;
        tokens[index] = u32::cast_from(ordering[at as usize]);
    }
    let mut sums = Array::<f32>::new(AT_ONCE);
    #[unroll]
    for index in 0..AT_ONCE {
        sums[index] = 0.0f32;
    }
    let mut vector = lane;
    while vector < candidates.vectors {
        let own = Vector::<f32, N>::cast_from(hidden[(row * candidates.vectors + vector) as usize]);
        let mut weights = Array::<Vector<E, N>>::new(AT_ONCE);
        #[unroll]
        for index in 0..AT_ONCE {
            let first = tokens[index] as usize * candidates.table_stride as usize;
            weights[index] = table[first + vector as usize];
        }
        #[unroll]
        for index in 0..AT_ONCE {
            let products = own * Vector::<f32, N>::cast_from(weights[index]);
            let mut sum = 0.0f32;
            #[unroll]
            for component in 0..products.vector_size().comptime() {
                sum += products.extract(component);
            }
            sums[index] += sum;
        }
        vector += comptime!(team.units as u32);
    }
    let mut best = f32::new(f32::MIN);
    let mut best_token = u32::MAX.runtime();
    #[unroll]
    for index in 0..AT_ONCE {
        let sum = part_of_sum(sums[index], team);
        let token = tokens[index];
        if sum > best || (sum == best && token < best_token) {
            best = sum;
            best_token = token;
        }
    }
    let mut found = Shared::<[f32]>::new_slice(teams);
    let mut found_tokens = Shared::<[u32]>::new_slice(teams);
    if lane == 0u32 {
        found[of_cube as usize] = best;
        found_tokens[of_cube as usize] = best_token;
    }
    bring_best_first(&mut found, &mut found_tokens, teams);
    if UNIT_POS == 0 {
        let token = found_tokens[0];
        let is_missing = token == u32::MAX;
        largest[CUBE_POS] = found[0];
        let number = I::cast_from(select(is_missing, 0u32, token));
        tokens_of_largest[CUBE_POS] = select(is_missing, I::new(-1), number);
    }
}
