//! Writes a warpgroup's part of a tile's output: through shared memory and TMA where they can take it, else by rows.

use crate::engine::wgmma::plan::OutputShape;
use crate::fragment::RowPair;
use crate::fragment::output::{normalise, without_blind, write_logsumexp, write_row};
use crate::fragment::work_tile::{Tile, TileKind};
use cube_kit::hopper::accumulator::Pair;
use cube_kit::hopper::tma::store_tma_tiles;
use cubecl::prelude::*;

/// A thread's part of what its warpgroup has of a tile.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Finished<NO: Size> {
    pub o: Vector<f32, NO>,
    pub reference: Pair,
    /// Over all columns of the rows.
    pub sums: Pair,
}

/// Where a warpgroup's part of a tile goes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Target {
    /// Shared memory that it goes through.
    pub staging: u32,
    /// Row of the thread's first register in the tile, and of the warpgroup's first.
    pub row: i32,
    pub first_row: i32,
    pub first_column: u32,
    pub writes_logsumexp: bool,
}

/// Writes a warpgroup's part of a tile.
#[cube]
pub(crate) fn write_tile<O: Float, K: Float, N: Size, NO: Size>(
    finished: Finished<NO>,
    target: Target,
    tile: &Tile,
    rows: &RowPair,
    sinks: &ComptimeOption<&Tensor<K>>,
    output_map: u64,
    output: &mut Tensor<Vector<O, N>>,
    logsumexp: &mut Tensor<f32>,
    scale: f32,
    negative_infinity: f32,
    #[comptime] shape: OutputShape,
    #[comptime] stores_output_by_tma: bool,
    #[comptime] kind: TileKind,
) {
    // From references to scores.
    let to_score = if comptime!(kind.fragment.raw) {
        scale
    } else {
        f32::new(1.0)
    };
    let exists_0 = target.row < tile.rows;
    let exists_1 = target.row + 8i32 < tile.rows;
    let first = normalise::<K>(
        finished.reference.first,
        finished.sums.first,
        to_score,
        rows.head_0,
        exists_0,
        sinks,
        negative_infinity,
    );
    let second = normalise::<K>(
        finished.reference.second,
        finished.sums.second,
        to_score,
        rows.head_1,
        exists_1,
        sinks,
        negative_infinity,
    );
    if target.writes_logsumexp {
        write_logsumexp(
            logsumexp,
            first,
            tile.part,
            rows.head_0,
            rows.position_0,
            exists_0,
        );
        write_logsumexp(
            logsumexp,
            second,
            tile.part,
            rows.head_1,
            rows.position_1,
            exists_1,
        );
    }
    let factors = Pair {
        first: first.factor,
        second: second.factor,
    };
    let o = without_blind::<NO>(finished.o, factors, shape.columns);
    if comptime!(stores_output_by_tma) {
        store_tma_tiles::<NO>(
            o,
            factors,
            target.staging,
            output_map,
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
        write_row::<O, N, NO>(
            o,
            factors.first,
            output,
            tile.part,
            rows.head_0,
            rows.position_0,
            exists_0,
            0usize,
            target.first_column,
            shape.columns,
            shape.value_dim,
        );
        write_row::<O, N, NO>(
            o,
            factors.second,
            output,
            tile.part,
            rows.head_1,
            rows.position_1,
            exists_1,
            1usize,
            target.first_column,
            shape.columns,
            shape.value_dim,
        );
    }
}
