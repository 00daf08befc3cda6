//! Lanes, and what they leave to be added up.

use super::super::sums::ProjectPlan;
use cube_kit::ampere::few_rows::PRODUCT_ROWS;
use cubecl::prelude::*;

/// A lane's place.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Lane {
    /// Its warp among those of the team.
    pub warp: u32,
    /// Its row of the input, and of each fragment.
    pub row: u32,
    /// Its columns of a step, and its pair of a fragment's outputs.
    pub column: u32,
}

#[cube]
pub(super) fn lane() -> Lane {
    let lane = UNIT_POS_X % 32u32;
    Lane {
        warp: UNIT_POS_X / 32u32,
        row: lane / 4u32,
        column: lane % 4u32,
    }
}

/// A row of a fragment's in its matrix: beyond the last one, the last one again, whose outputs nobody writes there.
#[cube]
pub(super) fn weight_row(
    first: u32,
    row: u32,
    outputs: u32,
    #[comptime] fragment: usize,
    #[comptime] plan: ProjectPlan,
) -> u32 {
    let fragment = comptime!(fragment % plan.fragments_of_matrix() * PRODUCT_ROWS);
    min(first + comptime!(fragment as u32) + row, outputs - 1u32)
}

/// Leaves a warp's sums of a fragment where [`finish_parts`](super::super::sums::finish_parts) finds them.
#[cube]
pub(super) fn leave_parts(
    partial: &mut Shared<[f32]>,
    sum: f32,
    next: f32,
    lane: Lane,
    #[comptime] fragment: usize,
    #[comptime] plan: ProjectPlan,
) {
    let parts = comptime!(plan.team.parts());
    if lane.row < comptime!(plan.rows as u32) {
        let weight = lane.row * comptime!(plan.weights() as u32)
            + comptime!((fragment * PRODUCT_ROWS) as u32)
            + 2u32 * lane.column;
        let of_team = UNIT_POS_Y as usize * comptime!(plan.sums() * plan.team.parts());
        let at = of_team + weight as usize * parts + lane.warp as usize;
        partial[at] = sum;
        partial[at + parts] = next;
    }
}
