//! How chunks of the operands come to shared memory.

use crate::engine::mma::backward::copies::held_head;
use crate::engine::mma::forward::copies::{HeadRows, Section, copy_section, head_source};
use crate::engine::mma::plan::BiasGradientTiles;
use crate::fragment::stationary::Stationary;
use crate::math::side::Side;
use cube_kit::hopper::SUBTILE;
use cubecl::prelude::*;

/// The operands of both products.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands<'query, 'key, 'value, 'gradient, E: Float> {
    pub query: &'query Tensor<E>,
    pub key: &'key Tensor<E>,
    pub value: &'value Tensor<E>,
    pub output_gradient: &'gradient Tensor<E>,
}

/// The kernel's operands, as its functions pass them on.
#[cube]
pub(super) fn operands<'query, 'key, 'value, 'gradient, E: Float>(
    query: &'query Tensor<E>,
    key: &'key Tensor<E>,
    value: &'value Tensor<E>,
    output_gradient: &'gradient Tensor<E>,
) -> Operands<'query, 'key, 'value, 'gradient, E> {
    Operands::<'query, 'key, 'value, 'gradient, E> {
        query,
        key,
        value,
        output_gradient,
    }
}

/// Starts to copy a chunk of a visit to the stage at `target`. Queries that do not exist and keys outside of the tile's run
/// become zeros.
#[cube]
pub(super) fn copy_chunk<E: Float>(
    operands: &Operands<'_, '_, '_, '_, E>,
    tile: &Stationary,
    key_tile: i32,
    target: u32,
    #[comptime] chunk: usize,
    #[comptime] tiles: BiasGradientTiles,
) {
    let is_dots = comptime!(chunk < tiles.dot_chunks());
    let own_chunk = comptime!(if is_dots {
        chunk
    } else {
        chunk - tiles.dot_chunks()
    });
    let width = comptime!(if is_dots {
        tiles.head_dim
    } else {
        tiles.value_dim
    });
    let queries = held_head(tile, Side::Queries);
    let keys = HeadRows {
        batch: tile.batch,
        head: tile.first_head,
        first: tile.run.first,
        end: tile.run.end,
    };
    let (rows, columns) = if comptime!(is_dots) {
        (
            head_source::<E>(operands.query, queries),
            head_source::<E>(operands.key, keys),
        )
    } else {
        (
            head_source::<E>(operands.output_gradient, queries),
            head_source::<E>(operands.value, keys),
        )
    };
    copy_section(
        rows,
        tile.first_row,
        target,
        comptime!(section(tiles.rows(), own_chunk, width)),
        comptime!(tiles.units()),
    );
    copy_section(
        columns,
        key_tile * comptime!(tiles.columns as i32),
        target + comptime!(tiles.key_rows_at() as u32),
        comptime!(section(tiles.columns, own_chunk, width)),
        comptime!(tiles.units()),
    );
}

/// A chunk of an operand.
const fn section(rows: usize, chunk: usize, width: usize) -> Section {
    Section {
        rows,
        first_column: chunk * SUBTILE,
        subtiles: 1,
        width,
    }
}
