//! Matrix products on Hopper, for the projections around attention and their gradients.
//!
//! Budget. Shared memory ([`MatrixTiles::shared_memory`]): a ring of `stages` chunks of 64 inner elements of both operands,
//! and the place that the output goes through. Registers: half a tile's columns a thread for the sum. A chunk takes the
//! tensor cores `4 · columns` clocks, and the shared memory `3 · columns / 2 + 128`: the matrix unit bounds tiles of 128
//! columns and more.
//!
//! Schedule. A cube stays for every so many-th tile. One thread of the fetching warpgroup keeps the ring full, across the
//! ends of tiles; the two others each multiply 64 rows, and write their output while the next tile's chunks arrive.

use super::text::multiply_matrices;
use crate::hopper::accumulator::pair;
use crate::hopper::pipeline::pipeline_state;
use crate::hopper::ptx::{
    barrier_expect, barrier_init, barrier_init_fence, barrier_wait, shared_address, tma_load,
    uniform,
};
use crate::hopper::tma::{await_stores, store_tma_tiles};
use crate::hopper::wgmma::{descriptor, transposed_descriptor};
use crate::hopper::{PRODUCT_ROWS, ROW_BYTES, SUBTILE, WARPGROUP};
use crate::matmul::plan::{Major, MatrixTiles};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Bytes of 64 rows of a subtile.
const SUBTILE_BYTES: usize = MatrixTiles::DEPTH * ROW_BYTES;

/// The tiles of a product.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct MatrixGrid {
    /// Tiles along the rows, and along the columns.
    pub rows: u32,
    pub columns: u32,
    /// Rows of tiles that are in flight together.
    pub together: u32,
    /// Chunks of the inner dimension.
    pub chunks: u32,
}

/// A tile's first row and column.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Corner {
    row: u32,
    column: u32,
}

/// The `item`-th tile: down a column of `together` tiles, then down the next.
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

/// The first columns of the second and the third of matrices side by side, in the product.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Starts {
    pub second: u32,
    pub third: u32,
}

/// The right operands, of which there are one or three.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sides {
    first: u64,
    second: u64,
    third: u64,
    starts: Starts,
}

/// A right operand, and a column of it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct SideColumn {
    map: u64,
    column: u32,
}

/// Where a column of the product comes from.
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

/// [`product`] with three right operands side by side, of which the last two may be the same.
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
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let stages = shared_address(&memory);
    let full = stages + comptime!(tiles.barriers_at() as u32);
    let empty = full + comptime!(8 * tiles.stages as u32);
    let consumers = comptime!((MatrixTiles::WARPGROUPS * WARPGROUP) as u32);
    if UNIT_POS == 0u32 {
        #[unroll]
        for stage in 0..tiles.stages {
            barrier_init(full + comptime!(8 * stage as u32), 1usize);
            barrier_init(
                empty + comptime!(8 * stage as u32),
                comptime!(4 * MatrixTiles::WARPGROUPS),
            );
        }
        barrier_init_fence();
    }
    sync_cube();

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
                tiles,
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
fn left_operand(address: u32, warpgroup: u32, #[comptime] tiles: MatrixTiles) -> u32 {
    // A warpgroup's rows are 64 rows of a subtile, or a subtile's columns.
    let own = address + warpgroup * comptime!(SUBTILE_BYTES as u32);
    if comptime!(tiles.lhs == Major::Inner) {
        uniform(descriptor(own))
    } else {
        uniform(transposed_descriptor(own, SUBTILE_BYTES))
    }
}

#[cube]
fn right_operand(address: u32, #[comptime] tiles: MatrixTiles) -> u32 {
    if comptime!(tiles.rhs == Major::Inner) {
        uniform(descriptor(address))
    } else {
        uniform(transposed_descriptor(address, SUBTILE_BYTES))
    }
}

/// Copies the chunks of all tiles in their order.
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
                at.row,
                inner,
                full,
                MatrixTiles::ROWS,
                comptime!(tiles.lhs),
            );
            load(
                target + comptime!(MatrixTiles::LHS_BYTES as u32),
                right.map,
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

/// Copies `extent` rows of the left operand, or columns of the right one, from `outer` on, of a chunk.
#[cube]
fn load(
    target: u32,
    map: u64,
    outer: u32,
    inner: u32,
    full: u32,
    #[comptime] extent: usize,
    #[comptime] major: Major,
) {
    if comptime!(major == Major::Inner) {
        tma_load(target, map, 0u32, 0u32, outer as i32, inner, full);
    } else {
        #[unroll]
        for subtile in 0..extent / SUBTILE {
            tma_load(
                target + comptime!((subtile * SUBTILE_BYTES) as u32),
                map,
                0u32,
                0u32,
                inner as i32,
                outer + comptime!((subtile * SUBTILE) as u32),
                full,
            );
        }
    }
}
