//! The epilogue of a kernel. Each warpgroup writes to global memory the rows and columns of the output or gradient that
//! it has computed. If the shape of the tile and of the tensor allows it, TMA does these writes.

use crate::engine::tensor_core::common::output::{
    Finished, OutputPart, normalised, output_rows, without_blind, write_rows,
};
use crate::engine::tensor_core::common::stationary_tile::{Stationary, write_gradient_rows};
use crate::engine::tensor_core::common::tile_scheduler::Tile;
use crate::engine::tensor_core::common::{FragmentKind, RowPair};
use crate::engine::tensor_core::wgmma::plan::OutputShape;
use crate::math::score::ScoreArguments;
use crate::math::side::Side;
use cube_kit::hopper::tma::store_tma_tiles;
use cube_kit::nvidia::accumulator::Pair;
use cubecl::prelude::*;

/// The places that a warpgroup needs to write its rows and columns of a tile: the staging buffer, the tensor map, and
/// the position of the rows in the tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct OutputTarget {
    /// The address of the staging buffer in shared memory.
    pub staging: u32,
    /// The address of the TMA tensor map of the output or gradient.
    pub map: u64,
    /// The tile row of the matrix element that the thread holds in its first accumulator register.
    pub row: i32,
    /// The tile row at which the warpgroup's rows begin.
    pub first_row: i32,
    pub first_column: u32,
}

/// Normalizes and writes the rows and columns of O that the warpgroup has computed. If `writes_logsumexp`, also writes the
/// LSE.
#[cube]
pub(crate) fn write_tile<O: Float, K: Float, N: Size, NO: Size>(
    finished: Finished<NO>,
    target: OutputTarget,
    writes_logsumexp: bool,
    tile: &Tile,
    rows: &RowPair,
    sinks: &ComptimeOption<OwnedTensor<K>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    arguments: &ScoreArguments,
    output_factor: f32,
    #[comptime] shape: OutputShape,
    #[comptime] kind: FragmentKind,
) {
    let rows = output_rows(tile, rows, target.row);
    let normalised = normalised::<K, NO>(
        finished,
        &rows,
        sinks,
        logsumexp,
        writes_logsumexp,
        arguments,
        output_factor,
        shape.columns,
        kind,
    );
    if comptime!(shape.stored_by_tma) {
        store_tma_tiles::<NO>(
            normalised.o,
            normalised.factors,
            target.staging,
            target.map,
            tile.batch,
            tile.first_head,
            tile.first_query + target.first_row,
            target.first_column,
            shape.columns,
            shape.subtile_bytes,
            shape.own_place,
            shape.half,
        );
    } else {
        write_rows::<O, N, NO>(
            normalised,
            output,
            &rows,
            target.first_column,
            shape.columns,
            shape.width,
        );
    }
}

/// Multiplies a warpgroup's rows and columns of a gradient by `factors`, and writes the products. The function stages
/// the products in a shared-memory buffer that still holds an operand. All warps must have read that operand before the
/// call.
#[cube]
pub(crate) fn write_gradient<G: Float, N: Size, NG: Size>(
    sums: Vector<f32, NG>,
    factors: Pair,
    target: OutputTarget,
    tile: &Stationary,
    gradient: &mut Tensor<Vector<G, N>>,
    #[comptime] shape: OutputShape,
    #[comptime] side: Side,
) {
    let mut sums = sums;
    if comptime!(side == Side::Queries) {
        sums = without_blind::<NG>(sums, factors, shape.columns);
    }
    if comptime!(shape.stored_by_tma) {
        store_tma_tiles::<NG>(
            sums,
            factors,
            target.staging,
            target.map,
            tile.batch,
            tile.head,
            tile.first_row + target.first_row,
            target.first_column,
            shape.columns,
            shape.subtile_bytes,
            shape.own_place,
            shape.half,
        );
    } else {
        write_gradient_rows::<G, N, NG>(
            OutputPart::<NG> { o: sums, factors },
            gradient,
            tile,
            target.row,
            target.first_column,
            shape.columns,
            shape.width,
        );
    }
}
