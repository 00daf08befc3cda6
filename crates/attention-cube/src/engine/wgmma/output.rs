//! Writes a warpgroup's part of an output or of a gradient: through shared memory and TMA, where these can take it.

use crate::engine::wgmma::plan::OutputShape;
use crate::fragment::output::{
    Finished, OutputPart, normalised, output_rows, without_blind, write_rows,
};
use crate::fragment::stationary::{Stationary, write_gradient_rows};
use crate::fragment::work_tile::Tile;
use crate::fragment::{FragmentKind, RowPair};
use crate::math::score::ScoreArguments;
use crate::math::side::Side;
use cube_kit::hopper::accumulator::Pair;
use cube_kit::hopper::tma::store_tma_tiles;
use cubecl::prelude::*;

/// Where a warpgroup's part of a tile goes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Target {
    /// Shared memory that it goes through.
    pub staging: u32,
    /// The tensor's map.
    pub map: u64,
    /// Row of the thread's first register in the tile, and of the warpgroup's first.
    pub row: i32,
    pub first_row: i32,
    pub first_column: u32,
}

/// Writes a warpgroup's part of a tile, and its logsumexps, where it is the warpgroup that does.
#[cube]
pub(crate) fn write_tile<O: Float, K: Float, N: Size, NO: Size>(
    finished: Finished<NO>,
    target: Target,
    writes_logsumexp: bool,
    tile: &Tile,
    rows: &RowPair,
    sinks: &ComptimeOption<&Tensor<K>>,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    arguments: &ScoreArguments,
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

/// Writes a warpgroup's part of a gradient of rows of this `side`, times `factors`. Nobody reads what was in its staging place any
/// more.
#[cube]
pub(crate) fn write_gradient<E: Float, N: Size, NG: Size>(
    sums: Vector<f32, NG>,
    factors: Pair,
    target: Target,
    tile: &Stationary,
    gradient: &mut Tensor<Vector<E, N>>,
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
        write_gradient_rows::<E, N, NG>(
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
