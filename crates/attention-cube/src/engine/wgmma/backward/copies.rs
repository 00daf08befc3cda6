//! What TMA copies for a tile that is held, and how a gradient of it is written.

use crate::fragment::output::{without_blind, write_row};
use crate::fragment::stationary::Stationary;
use crate::math::side::Side;
use cube_kit::hopper::accumulator::Pair;
use cube_kit::hopper::ptx::barrier_expect;
use cube_kit::hopper::tma::{load_subtiles, store_tma_tiles};
use cube_kit::hopper::{Half, ROW_BYTES, SUBTILE, is_whole};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// Which way sequences and heads lead through the operands: 0 where one is broadcast, else 1.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct GradientSteps {
    pub stationary_dot_batch: u32,
    pub stationary_dot_head: u32,
    pub stationary_value_batch: u32,
    pub stationary_value_head: u32,
    pub dot_batch: u32,
    pub dot_head: u32,
    pub value_batch: u32,
    pub value_head: u32,
}

/// Copies the rows that the tile holds: dots to `dots`, and, where there are `bytes` of both, values to `values`.
#[cube]
pub(crate) fn fetch_stationary<E: Float>(
    stationary_dots: &TensorMap<E, Tiled>,
    stationary_values: &TensorMap<E, Tiled>,
    tile: &Stationary,
    steps: &GradientSteps,
    dots: u32,
    values: u32,
    full: u32,
    #[comptime] rows: usize,
    #[comptime] head_dim: usize,
    #[comptime] value_dim: usize,
    #[comptime] bytes: usize,
) {
    let dot_subtiles = comptime!(head_dim.div_ceil(SUBTILE));
    let subtile_bytes = comptime!(rows * ROW_BYTES);
    barrier_expect(full, bytes);
    load_subtiles(
        dots,
        tensor_map_address(stationary_dots),
        tile.batch * steps.stationary_dot_batch,
        tile.head * steps.stationary_dot_head,
        tile.first_row,
        full,
        0usize,
        dot_subtiles,
        subtile_bytes,
        comptime!(is_whole(head_dim)),
    );
    if comptime!(bytes > dot_subtiles * subtile_bytes) {
        load_subtiles(
            values,
            tensor_map_address(stationary_values),
            tile.batch * steps.stationary_value_batch,
            tile.head * steps.stationary_value_head,
            tile.first_row,
            full,
            0usize,
            comptime!(value_dim.div_ceil(SUBTILE)),
            subtile_bytes,
            comptime!(is_whole(value_dim)),
        );
    }
}

/// Where a warpgroup's part of a gradient is: its first row in the tile, the thread's, and its first column.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct GradientPart {
    pub first_row: i32,
    pub row: i32,
    pub first_column: u32,
}

/// Writes a warpgroup's part of the gradient, `columns` of `width`, its rows times `factors`: through `staging` in `boxes`, or at once.
/// Nobody reads what was held there any more.
#[cube]
pub(crate) fn write_gradient<E: Float, N: Size, NG: Size>(
    sums: Vector<f32, NG>,
    factors: Pair,
    staging: u32,
    map: u64,
    gradient: &mut Tensor<Vector<E, N>>,
    tile: &Stationary,
    part: GradientPart,
    #[comptime] columns: usize,
    #[comptime] width: usize,
    #[comptime] subtile_bytes: usize,
    #[comptime] boxes: bool,
    #[comptime] half: Half,
    #[comptime] side: Side,
) {
    let mut sums = sums;
    if comptime!(side == Side::Queries) {
        sums = without_blind::<NG>(sums, factors, columns);
    }
    if comptime!(boxes) {
        store_tma_tiles::<NG>(
            sums,
            factors,
            staging,
            map,
            tile.batch,
            tile.head,
            tile.first_row + part.first_row,
            part.first_column,
            columns,
            subtile_bytes,
            true,
            half,
        );
    } else {
        #[unroll]
        for which in 0..2usize {
            let own = part.row + comptime!(8 * which as i32);
            let factor = if comptime!(which == 0) {
                factors.first
            } else {
                factors.second
            };
            write_row::<E, N, NG>(
                sums,
                factor,
                gradient,
                tile.batch,
                tile.head,
                tile.first_row + own,
                own < tile.rows,
                which,
                part.first_column,
                columns,
                width,
            );
        }
    }
}
