//! Positions of threads in a warp, and the partial sums that warps write to shared memory.

use super::super::sums::{ProjectPlan, place_of_part};
use cube_kit::ampere::gemv::PRODUCT_ROWS;
use cubecl::prelude::*;

/// The position of a thread in the tensor-core fragments, and among the warps that compute a few outputs together.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Lane {
    /// The index of the thread's warp within its team of warps.
    pub warp: u32,
    /// The index, 0 to 7, of the row that the thread reads. The index counts both the rows of the input and the weight
    /// rows of a fragment.
    pub row: u32,
    /// The thread's index, 0 to 3, among the four threads of its row. The index selects the 16 bytes that the thread
    /// loads, and the pair of columns that the thread holds in the result of `mma.sync`.
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

/// Returns the row of a matrix that the thread reads for a fragment, clamped to the last row of the matrix.
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

/// Writes a warp's partial sums of a fragment to shared memory. [`finish_parts`](super::super::sums::finish_parts) adds
/// up the partial sums of all warps.
#[cube]
pub(super) fn leave_parts(
    partial: &mut Shared<[f32]>,
    sum: f32,
    next: f32,
    lane: Lane,
    #[comptime] fragment: usize,
    #[comptime] plan: ProjectPlan,
) {
    if lane.row < comptime!(plan.rows as u32) {
        let weight = comptime!((fragment * PRODUCT_ROWS) as u32) + 2u32 * lane.column;
        let at = place_of_part(lane.warp, lane.row, weight, plan);
        partial[at] = sum;
        partial[at + 1] = next;
    }
}
