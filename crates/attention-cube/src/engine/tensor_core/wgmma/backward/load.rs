//! The TMA tensor maps of the gradient kernels, and the TMA copy of a stationary tile.

use crate::engine::tensor_core::common::stationary_tile::Stationary;
use cube_kit::hopper::ptx::barrier_expect;
use cube_kit::hopper::tma::load_subtiles;
use cube_kit::nvidia::{ROW_BYTES, SUBTILE, is_whole};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The factors that turn batch and head indices into TMA coordinates: for each tensor, one factor for the batch index
/// and one for the head index. The factor is 0 if the tensor is broadcast in that dimension, else 1.
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
    pub bias_batch: u32,
    pub bias_head: u32,
}

/// The TMA tensor maps of a gradient kernel, and the factors that turn batch and head indices into TMA coordinates. The
/// stationary tile has rows of queries or rows of keys. The comments of the fields name the tensor for each of the two
/// cases.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct GradientMaps<E: Float> {
    /// The rows of the stationary tile: Q for a tile of queries, K for a tile of keys.
    pub stationary_qk: TensorMap<E, Tiled>,
    /// The rows of the stationary tile: dO for a tile of queries, V for a tile of keys.
    pub stationary_v_do: TensorMap<E, Tiled>,
    /// The blocks that the tile streams: K for a tile of queries, Q for a tile of keys.
    pub q_or_k: TensorMap<E, Tiled>,
    /// The blocks that the tile streams: V for a tile of queries, dO for a tile of keys.
    pub v_or_do: TensorMap<E, Tiled>,
    /// The tensor map of the bias in a split-M kernel. In a split-D kernel, the tensor map of `summed`, the right
    /// operand of the gradient GEMM (see `backward/split_d.rs`).
    pub bias_or_summed: TensorMap<E, Tiled>,
    /// The LSE and delta of each query.
    pub lse_delta: TensorMap<f32, Tiled>,
    /// The gradient of Q (tile of queries) or of K (tile of keys).
    pub qk_gradient: TensorMap<E, Tiled>,
    /// The gradient of V.
    pub value_gradient: TensorMap<E, Tiled>,
    pub steps: GradientSteps,
}

/// Copies the stationary tile's rows of Q or K to the address `q_or_k`. If `bytes` is more than the bytes of these
/// rows, the function also copies the tile's rows of dO or V to the address `v_or_do`. The barrier `full` waits for
/// `bytes` bytes, which is the total of both copies.
#[cube]
pub(crate) fn fetch_stationary<E: Float>(
    stationary_qk: &TensorMap<E, Tiled>,
    stationary_v_do: &TensorMap<E, Tiled>,
    tile: &Stationary,
    steps: &GradientSteps,
    q_or_k: u32,
    v_or_do: u32,
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
        q_or_k,
        tensor_map_address(stationary_qk),
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
            v_or_do,
            tensor_map_address(stationary_v_do),
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
