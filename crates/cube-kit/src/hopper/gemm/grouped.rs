//! Grouped GEMM on Hopper: the rows of each group times the group's own matrix, as in a mixture of experts.
//!
//! A group's rows fill whole tiles of the left operand, so that no tile contains rows of two groups. The table of tiles
//! is on the device, so the launch does not depend on the sizes of the groups.
//!
//! Budget, schedule and bound are those of the plain GEMM (`kernel.rs`). In addition, the cube reads one or two numbers
//! of the table for each tile. The producer reads these numbers while the ring buffer still holds chunks of the
//! previous tile.

use super::kernel::{left_operand, load, right_operand};
use super::mainloop::multiply_matrices;
use super::ring::{Ring, prepare_ring};
use crate::hopper::gemm::plan::{Grouping, MatrixTiles};
use crate::hopper::pipeline::pipeline_state;
use crate::hopper::ptx::{barrier_expect, barrier_wait};
use crate::hopper::tma::{await_stores, store_tma_tiles};
use crate::hopper::{PRODUCT_ROWS, WARPGROUP};
use crate::nvidia::ROW_BYTES;
use crate::nvidia::accumulator::pair;
use crate::nvidia::ptx::uniform;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The sizes of a grouped GEMM.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct GroupSizes {
    pub groups: u32,
    /// The number of tile rows (rows of the grid of tiles) in the result of one group. Only the grouping
    /// [`Grouping::Inner`] uses this number.
    pub rows: u32,
    /// The number of tile columns.
    pub columns: u32,
    /// The number of chunks along the inner dimension. Only the grouping [`Grouping::Rows`] uses this number.
    pub chunks: u32,
    /// The number of rows that are divided into groups. These rows are the rows of the left operand and, with
    /// [`Grouping::Inner`], also the rows of the right operand.
    pub slots: u32,
}

/// A tile of the result, and the chunks of the inner dimension that are summed for this tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct GroupTile {
    group: u32,
    /// The first row and the first column of the tile.
    row: u32,
    column: u32,
    /// The first inner element.
    inner: u32,
    chunks: u32,
}

/// Returns the number of tiles of the result.
#[cube]
fn tile_count(table: &Tensor<i32>, sizes: &GroupSizes, #[comptime] grouping: Grouping) -> u32 {
    if comptime!(grouping == Grouping::Rows) {
        u32::cast_from(table[sizes.groups as usize]) * sizes.columns
    } else {
        sizes.groups * sizes.rows * sizes.columns
    }
}

/// Returns the tile with index `item`. Tiles are numbered along each row of the grid of tiles, row after row, so that
/// the tiles of a group are in flight together. The group's matrix is then read into the L2 cache once, and all these
/// tiles use the cached matrix.
#[cube]
fn group_tile(
    table: &Tensor<i32>,
    sizes: &GroupSizes,
    item: u32,
    #[comptime] grouping: Grouping,
    #[comptime] tiles: MatrixTiles,
) -> GroupTile {
    let rows = comptime!(MatrixTiles::ROWS as u32);
    let row = item / sizes.columns;
    let column = item % sizes.columns * comptime!(tiles.columns as u32);
    if comptime!(grouping == Grouping::Rows) {
        GroupTile {
            group: u32::cast_from(table[(sizes.groups + 1u32 + row) as usize]),
            row: row * rows,
            column,
            inner: 0u32,
            chunks: sizes.chunks,
        }
    } else {
        let group = row / sizes.rows;
        let first = u32::cast_from(table[group as usize]);
        let count = u32::cast_from(table[group as usize + 1]) - first;
        // The tile of a group without rows sums over one chunk. This chunk lies beyond the operands, so TMA reads
        // zeros.
        GroupTile {
            group,
            row: row % sizes.rows * rows,
            column,
            inner: select(count == 0u32, sizes.slots, first * rows),
            chunks: max(
                count * comptime!((MatrixTiles::ROWS / MatrixTiles::DEPTH) as u32),
                1u32,
            ),
        }
    }
}

/// Multiplies the groups. In `table`, a tile row consists of [`MatrixTiles::ROWS`] rows that belong to one group.
/// `table` holds the first tile row of each group, then the total number of tile rows, and then the group of each tile
/// row.
#[cube(launch_unchecked)]
pub(crate) fn product_of_groups<E: Float, N: Size>(
    lhs: &TensorMap<E, Tiled>,
    rhs: &TensorMap<E, Tiled>,
    output: &TensorMap<E, Tiled>,
    table: &Tensor<i32>,
    sizes: GroupSizes,
    #[comptime] grouping: Grouping,
    #[comptime] tiles: MatrixTiles,
    #[define(E)] _element: ElemType,
    #[define(N)] _fragment: usize,
) {
    let ring = prepare_ring(comptime!(tiles.ring()));
    let consumers = comptime!((MatrixTiles::WARPGROUPS * WARPGROUP) as u32);
    let items = tile_count(table, &sizes, grouping);
    if UNIT_POS >= consumers {
        if UNIT_POS == consumers {
            fetch_groups(
                tensor_map_address(lhs),
                tensor_map_address(rhs),
                table,
                &sizes,
                items,
                ring,
                grouping,
                tiles,
            );
        }
    } else {
        let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
        let lane = UNIT_POS % 32u32;
        let elected = u32::cast_from(lane == 0u32);
        let left = left_operand(ring.stages, warpgroup, tiles);
        let right = right_operand(
            ring.stages + comptime!(MatrixTiles::LHS_BYTES as u32),
            tiles,
        );
        let staging = ring.stages
            + comptime!(tiles.output_at() as u32)
            + warpgroup * comptime!(tiles.output_bytes() as u32);
        let mut item = CUBE_POS as u32;
        let mut passed = 0u32;
        while item < items {
            let at = group_tile(table, &sizes, item, grouping, tiles);
            let first = pipeline_state(passed, tiles.stages);
            let sum = multiply_matrices::<N>(
                left,
                right,
                ring.full,
                ring.empty,
                elected,
                at.chunks,
                first.stage,
                first.parity,
                comptime!(tiles.mainloop()),
            );
            store_tma_tiles::<N>(
                sum,
                pair(1.0f32, 1.0f32),
                staging,
                tensor_map_address(output),
                0u32,
                matrix_if(at.group, comptime!(grouping == Grouping::Inner)),
                (at.row + warpgroup * comptime!(PRODUCT_ROWS as u32)) as i32,
                at.column,
                tiles.columns,
                comptime!(PRODUCT_ROWS * ROW_BYTES),
                true,
                tiles.half,
            );
            passed += at.chunks;
            item += CUBE_COUNT as u32;
        }
        await_stores();
    }
}

/// Returns the index of a group's matrix in a stack of matrices. Returns 0 if the operand is not a stack.
#[cube]
fn matrix_if(group: u32, #[comptime] is_stack: bool) -> u32 {
    if comptime!(is_stack) {
        group
    } else {
        0u32.runtime()
    }
}

/// Copies the chunks of all tiles that this cube computes, in order. This function is the loop of the producer.
#[cube]
fn fetch_groups(
    lhs: u64,
    rhs: u64,
    table: &Tensor<i32>,
    sizes: &GroupSizes,
    items: u32,
    ring: Ring,
    #[comptime] grouping: Grouping,
    #[comptime] tiles: MatrixTiles,
) {
    let mut item = CUBE_POS as u32;
    let mut stage = 0u32;
    let mut parity = 1u32;
    while item < items {
        let at = group_tile(table, sizes, item, grouping, tiles);
        let matrix = matrix_if(at.group, comptime!(grouping == Grouping::Rows));
        let mut chunk = 0u32;
        while chunk < at.chunks {
            let full = ring.full + 8u32 * stage;
            let target = ring.stages + stage * comptime!(tiles.stage_bytes() as u32);
            let inner = at.inner + chunk * comptime!(MatrixTiles::DEPTH as u32);
            barrier_wait(ring.empty + 8u32 * stage, parity);
            barrier_expect(full, comptime!(tiles.stage_bytes()));
            load(
                target,
                lhs,
                0u32,
                at.row,
                inner,
                full,
                MatrixTiles::ROWS,
                comptime!(tiles.lhs),
            );
            load(
                target + comptime!(MatrixTiles::LHS_BYTES as u32),
                rhs,
                matrix,
                at.column,
                inner,
                full,
                tiles.columns,
                comptime!(tiles.rhs),
            );
            stage += 1u32;
            if stage == comptime!(tiles.stages as u32) {
                stage = 0u32;
                parity = 1u32 - parity;
            }
            chunk += 1u32;
        }
        item += CUBE_COUNT as u32;
    }
}
