//! What TMA copies for a tile that is held.

use crate::fragment::stationary::Stationary;
use cube_kit::hopper::ptx::barrier_expect;
use cube_kit::hopper::tma::load_subtiles;
use cube_kit::hopper::{ROW_BYTES, SUBTILE, is_whole};
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
