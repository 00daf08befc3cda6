//! Asynchronous copies of operands from global to shared memory, in chunks of 64 columns.

use crate::engine::tensor_core::common::stationary_tile::Stationary;
use crate::engine::tensor_core::mma::backward::load::stationary_head;
use crate::engine::tensor_core::mma::forward::load::{
    HeadRows, Section, copy_section, head_source,
};
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use crate::math::side::Side;
use cube_kit::nvidia::SUBTILE;
use cubecl::prelude::*;

/// The operands of the GEMMs S = Q·Kᵀ and dP = dO·Vᵀ: Q `[batch, q_heads, q_len, head_dim]`, K
/// `[batch, kv_heads, kv_len, head_dim]`, V `[batch, kv_heads, kv_len, value_dim]` and dO
/// `[batch, q_heads, q_len, value_dim]`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands<'query, 'key, 'value, 'gradient, E: Float> {
    pub query: &'query Tensor<E>,
    pub key: &'key Tensor<E>,
    pub value: &'value Tensor<E>,
    pub output_gradient: &'gradient Tensor<E>,
}

/// Bundles the tensors Q, K, V and dO into one [`Operands`].
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

/// Starts the copies of the `chunk`-th chunk (64 columns) of two operands. For the GEMM of S, the operands are Q and K.
/// For the GEMM of dP, the operands are dO and V. The function copies the rows of query tile `tile` and of key tile
/// `key_tile`. The copies go to the stage (shared-memory buffer) at address `target`. The copies write zeros for
/// queries that do not exist, and for keys that no query of the tile sees.
#[cube]
pub(super) fn copy_chunk<E: Float>(
    operands: &Operands<'_, '_, '_, '_, E>,
    tile: &Stationary,
    key_tile: i32,
    target: u32,
    #[comptime] chunk: usize,
    #[comptime] tiles: BiasGradientTiles,
) {
    let is_q_or_k = comptime!(chunk < tiles.dot_chunks());
    let own_chunk = comptime!(if is_q_or_k {
        chunk
    } else {
        chunk - tiles.dot_chunks()
    });
    let width = comptime!(if is_q_or_k {
        tiles.head_dim
    } else {
        tiles.value_dim
    });
    let queries = stationary_head(tile, Side::Queries);
    let keys = HeadRows {
        batch: tile.batch,
        head: tile.first_head,
        first: tile.run.first,
        end: tile.run.end,
    };
    let (rows, columns) = if comptime!(is_q_or_k) {
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

/// Returns the rows and columns of the `chunk`-th chunk (64 columns) of an operand with `width` columns.
const fn section(rows: usize, chunk: usize, width: usize) -> Section {
    Section {
        rows,
        first_column: chunk * SUBTILE,
        subtiles: 1,
        width,
    }
}
