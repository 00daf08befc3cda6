//! GEMM on Hopper, for the projections around attention and their gradients.
//!
//! Budget: shared memory ([`MatrixTiles::shared_memory`]) has a ring buffer and a staging area for the output. The ring
//! buffer has `stages` stages, each with a chunk of both operands. A chunk has 64 inner elements. Each consumer thread
//! has half as many accumulator registers as a tile has columns.
//!
//! Schedule: persistent cubes with warp specialization. A cube processes every `CUBE_COUNT`-th tile. One thread of the
//! producer warpgroup fills the ring buffer without a pause between tiles. Each of two consumer warpgroups multiplies
//! 64 rows, and writes its output while the producer loads the next tile's chunks.
//!
//! Bound: a chunk needs `4 · columns` clocks of the tensor cores and `3 · columns / 2 + 128` clocks of shared memory,
//! where `columns` is the width of the tile. By these numbers the tensor cores bound every tile. A tile of 64
//! columns takes the time of 96 columns nevertheless: see `LEAST_WIDTH` in `plan.rs`.

use super::mainloop::{SUBTILE_BYTES, multiply_matrices};
use super::ring::{Ring, prepare_ring};
use crate::hopper::gemm::plan::MatrixTiles;
use crate::hopper::pipeline::pipeline_state;
use crate::hopper::ptx::{barrier_expect, barrier_wait, tma_load};
use crate::hopper::tma::{await_stores, store_tma_tiles};
use crate::hopper::wgmma::{descriptor, transposed_descriptor};
use crate::hopper::{PRODUCT_ROWS, WARPGROUP};
use crate::nvidia::accumulator::pair;
use crate::nvidia::matrix::Major;
use crate::nvidia::ptx::uniform;
use crate::nvidia::{ROW_BYTES, SUBTILE};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The grid of tiles of a GEMM.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct MatrixGrid {
    /// The height (`rows`) and the width (`columns`) of the grid in tiles. A tile row is a row of this grid.
    pub rows: u32,
    pub columns: u32,
    /// The number of tile rows that are in flight at the same time.
    pub together: u32,
    /// The number of chunks along the inner dimension.
    pub chunks: u32,
}

/// The first row and the first column of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Corner {
    row: u32,
    column: u32,
}

/// Returns the first row and the first column of the tile with index `item`. The rows of the grid of tiles are divided
/// into groups of `together` rows. Within a group, tiles are numbered column by column of the grid.
#[cube]
fn corner(grid: &MatrixGrid, item: u32, #[comptime] tiles: MatrixTiles) -> Corner {
    let of_group = grid.together * grid.columns;
    let first = item / of_group * grid.together;
    let height = min(grid.together, grid.rows - first);
    let within = item % of_group;
    Corner {
        row: (first + within % height) * comptime!(MatrixTiles::ROWS as u32),
        column: within / height * comptime!(tiles.columns as u32),
    }
}

/// The results of the right operands lie side by side in one matrix. `second` and `third` are the columns of this
/// matrix at which the results of the second and the third right operand begin.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Starts {
    pub second: u32,
    pub third: u32,
}

/// The tensor maps of the right operands. If only one right operand exists, all three maps are equal.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sides {
    first: u64,
    second: u64,
    third: u64,
    starts: Starts,
}

/// The tensor map of one right operand, and the index of a column of this operand.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct SideColumn {
    map: u64,
    column: u32,
}

/// Returns the tensor map of the right operand that gives column `column` of the result, and the column's index within
/// this operand.
#[cube]
fn side_of(sides: Sides, column: u32, #[comptime] several: bool) -> SideColumn {
    let mut side = SideColumn {
        map: sides.first,
        column,
    };
    if comptime!(several) {
        if column >= sides.starts.third {
            side.map = sides.third;
            side.column = column - sides.starts.third;
        } else if column >= sides.starts.second {
            side.map = sides.second;
            side.column = column - sides.starts.second;
        }
    }
    side
}

#[cube(launch_unchecked)]
pub(crate) fn product<E: Float, N: Size>(
    lhs: &TensorMap<E, Tiled>,
    rhs: &TensorMap<E, Tiled>,
    output: &TensorMap<E, Tiled>,
    grid: MatrixGrid,
    starts: Starts,
    #[comptime] tiles: MatrixTiles,
    #[define(E)] _element: ElemType,
    #[define(N)] _fragment: usize,
) {
    let map = tensor_map_address(rhs);
    let sides = Sides {
        first: map,
        second: map,
        third: map,
        starts,
    };
    multiply_tiles::<N>(
        tensor_map_address(lhs),
        sides,
        tensor_map_address(output),
        grid,
        false,
        tiles,
    );
}

/// Multiplies the left operand by three right operands, and writes the results side by side. The second and the third
/// right operand may be the same. The kernel for only one right operand is [`product`].
#[cube(launch_unchecked)]
pub(crate) fn product_of_sides<E: Float, N: Size>(
    lhs: &TensorMap<E, Tiled>,
    first: &TensorMap<E, Tiled>,
    second: &TensorMap<E, Tiled>,
    third: &TensorMap<E, Tiled>,
    output: &TensorMap<E, Tiled>,
    grid: MatrixGrid,
    starts: Starts,
    #[comptime] tiles: MatrixTiles,
    #[define(E)] _element: ElemType,
    #[define(N)] _fragment: usize,
) {
    let sides = Sides {
        first: tensor_map_address(first),
        second: tensor_map_address(second),
        third: tensor_map_address(third),
        starts,
    };
    multiply_tiles::<N>(
        tensor_map_address(lhs),
        sides,
        tensor_map_address(output),
        grid,
        true,
        tiles,
    );
}

#[cube]
fn multiply_tiles<N: Size>(
    lhs: u64,
    sides: Sides,
    output: u64,
    grid: MatrixGrid,
    #[comptime] several: bool,
    #[comptime] tiles: MatrixTiles,
) {
    let Ring {
        stages,
        full,
        empty,
    } = prepare_ring(comptime!(tiles.ring()));
    let consumers = comptime!((MatrixTiles::WARPGROUPS * WARPGROUP) as u32);

    let items = grid.rows * grid.columns;
    if UNIT_POS >= consumers {
        if UNIT_POS == consumers {
            fetch(
                lhs, sides, &grid, items, stages, full, empty, several, tiles,
            );
        }
    } else {
        let warpgroup = uniform(UNIT_POS / comptime!(WARPGROUP as u32));
        let lane = UNIT_POS % 32u32;
        let elected = u32::cast_from(lane == 0u32);
        let left = left_operand(stages, warpgroup, tiles);
        let right = right_operand(stages + comptime!(MatrixTiles::LHS_BYTES as u32), tiles);
        let staging = stages
            + comptime!(tiles.output_at() as u32)
            + warpgroup * comptime!(tiles.output_bytes() as u32);
        let mut item = CUBE_POS as u32;
        let mut passed = 0u32;
        while item < items {
            let at = corner(&grid, item, tiles);
            let first = pipeline_state(passed, tiles.stages);
            let sum = multiply_matrices::<N>(
                left,
                right,
                full,
                empty,
                elected,
                grid.chunks,
                first.stage,
                first.parity,
                comptime!(tiles.mainloop()),
            );
            store_tma_tiles::<N>(
                sum,
                pair(1.0f32, 1.0f32),
                staging,
                output,
                0u32,
                0u32,
                (at.row + warpgroup * comptime!(PRODUCT_ROWS as u32)) as i32,
                at.column,
                tiles.columns,
                comptime!(PRODUCT_ROWS * ROW_BYTES),
                true,
                tiles.half,
            );
            passed += grid.chunks;
            item += CUBE_COUNT as u32;
        }
        await_stores();
    }
}

#[cube]
pub(super) fn left_operand(address: u32, warpgroup: u32, #[comptime] tiles: MatrixTiles) -> u32 {
    // If the left operand is contiguous along the inner dimension, the warpgroup's 64 rows are the 64 rows of a
    // subtile. Otherwise the warpgroup's rows are the 64 columns of a subtile.
    let own = address + warpgroup * comptime!(SUBTILE_BYTES as u32);
    if comptime!(tiles.lhs == Major::Inner) {
        uniform(descriptor(own))
    } else {
        uniform(transposed_descriptor(own, SUBTILE_BYTES))
    }
}

#[cube]
pub(super) fn right_operand(address: u32, #[comptime] tiles: MatrixTiles) -> u32 {
    if comptime!(tiles.rhs == Major::Inner) {
        uniform(descriptor(address))
    } else {
        uniform(transposed_descriptor(address, SUBTILE_BYTES))
    }
}

/// Copies the chunks of all tiles that this cube computes, in order. This function is the loop of the producer.
#[cube]
fn fetch(
    lhs: u64,
    sides: Sides,
    grid: &MatrixGrid,
    items: u32,
    stages: u32,
    first_full: u32,
    first_empty: u32,
    #[comptime] several: bool,
    #[comptime] tiles: MatrixTiles,
) {
    let mut item = CUBE_POS as u32;
    let mut stage = 0u32;
    let mut parity = 1u32;
    while item < items {
        let at = corner(grid, item, tiles);
        let right = side_of(sides, at.column, several);
        let mut chunk = 0u32;
        while chunk < grid.chunks {
            let full = first_full + 8u32 * stage;
            let target = stages + stage * comptime!(tiles.stage_bytes() as u32);
            let inner = chunk * comptime!(MatrixTiles::DEPTH as u32);
            barrier_wait(first_empty + 8u32 * stage, parity);
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
                right.map,
                0u32,
                right.column,
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

/// Copies a chunk of an operand to shared memory: `extent` rows of the left operand or `extent` columns of the right
/// operand, from index `outer` on. `matrix` is the index of the matrix in a stack of matrices.
#[cube]
pub(super) fn load(
    target: u32,
    map: u64,
    matrix: u32,
    outer: u32,
    inner: u32,
    full: u32,
    #[comptime] extent: usize,
    #[comptime] major: Major,
) {
    if comptime!(major == Major::Inner) {
        tma_load(target, map, 0u32, matrix, outer as i32, inner, full);
    } else {
        #[unroll]
        for subtile in 0..extent / SUBTILE {
            tma_load(
                target + comptime!((subtile * SUBTILE_BYTES) as u32),
                map,
                0u32,
                matrix,
                inner as i32,
                outer + comptime!((subtile * SUBTILE) as u32),
                full,
            );
        }
    }
}
