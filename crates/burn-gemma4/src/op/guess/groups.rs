//! A head that looks at the tokens of a few groups: which groups, and which of their tokens is the likeliest.
//!
//! Budget: 12 KB in shared memory at most, in registers a score and its rank, or [`AT_ONCE`] sums and tokens. Bound by latency: a row's scores are a few
//! kilobytes, which every cube reads, the rows of the table a few megabytes, of which a unit has [`AT_ONCE`] vectors in flight. Reads that wait for
//! each other behind the launch before: of the groups none, of their tokens the group, its token and by that the row.
//!
//! Groups are chosen by counting for each how many come before it, which any number of cubes do at once: to sort them, one cube would take longer.

use crate::op::argmax::kernel::bring_best_first;
use crate::op::sums::{Team, part_of_sum};
use cube_kit::overlap::{take_turn, was_written};
use cubecl::prelude::*;

/// Scores that a cube counts for, and units that share the counting of one. Not measured yet.
pub(super) const OWN: usize = 16;
const SHARES: usize = 16;

/// Units of a cube that chooses groups.
pub(super) const CHOOSING_UNITS: usize = OWN * SHARES;

/// Scores in shared memory at a time.
const STRETCH: usize = 2048;

/// Rows of the table that a team reads at once. Not measured yet.
pub(super) const AT_ONCE: usize = 4;

/// The `top_k` groups of the largest scores of each row, the largest first, of equal ones the first; what is no number counts as the smallest there is.
#[cube(launch_unchecked)]
pub(super) fn choose_groups_overlapped<E: Float, I: Int>(
    scores: &Tensor<E>,
    chosen: &mut Tensor<I>,
    start: u32,
    stride: u32,
    groups: u32,
    top_k: u32,
    cubes_of_row: u32,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    take_turn(overlaps);
    was_written(scores, overlaps);
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
        // Someone may still be comparing with the stretch before.
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

/// A score; of what is no number the smallest.
#[cube]
fn score_of<E: Float>(scores: &Tensor<E>, first: u32, group: u32) -> f32 {
    let score = f32::cast_from(scores[(first + group) as usize]);
    let least = f32::new(f32::MIN);
    select(score > least, score, least)
}

/// Where the tokens of groups are, and the rows of the table.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Candidates {
    /// Tokens of a group.
    pub of_group: u32,
    /// Groups that are looked at.
    pub groups: u32,
    /// Vectors of a row, and from one of the table to the next.
    pub vectors: u32,
    pub table_stride: u32,
    pub cubes_of_row: u32,
}

/// Of a cube's part of the tokens of a row's groups the largest product of the row and the token's row of the table, and the token, of equal ones the
/// smallest; −1 where no product is a number above −∞. A cube's teams look at [`AT_ONCE`] tokens each.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn look_at_groups_overlapped<E: Float, I: Int, N: Size>(
    hidden: &Tensor<Vector<E, N>>,
    table: &Tensor<Vector<E, N>>,
    ordering: &Tensor<I>,
    chosen: &Tensor<I>,
    largest: &mut Tensor<f32>,
    tokens_of_largest: &mut Tensor<I>,
    candidates: Candidates,
    #[comptime] team: Team,
    #[comptime] teams: usize,
    #[comptime] overlaps: bool,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
    #[define(N)] _vector: usize,
) {
    take_turn(overlaps);
    was_written(hidden, overlaps);
    was_written(table, overlaps);
    was_written(ordering, overlaps);
    was_written(chosen, overlaps);
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
        // Behind the last that one is looked at again.
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
