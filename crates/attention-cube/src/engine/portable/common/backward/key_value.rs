//! The gradients of keys and values. A cube keeps a tile of keys in shared memory, and streams all queries of the GQA group
//! that see any of these keys.
//!
//! Tensors:
//!
//! - Query `[batch, q_heads, q_len, head_dim]`, and the output's gradient `[batch, q_heads, q_len, value_dim]`.
//! - Keys and their gradient `[batch, kv_heads, kv_len, head_dim]`.
//! - Values and their gradient `[batch, kv_heads, kv_len, value_dim]`.
//! - LSE and delta (`rows`) `[batch, q_heads, 5, padded q_len]`, f32.
//!
//! Budget: [`UnitTiles::shared_memory`](crate::tile_ops::tiles::UnitTiles::shared_memory). A unit's registers hold
//! `8 · rows_per_unit` elements of Sᵀ and dPᵀ, and `8 · output_rows · output_vectors` elements of dK and dV. A unit has
//! `rows_per_unit` rows of Sᵀ. The unit also has `output_rows` rows of dK and dV, with `output_vectors` vectors of 4 columns
//! each. Because dK and dV both stay in registers, tiles of wide heads have fewer rows than in the forward. A tile of `rows`
//! keys and a block of `columns` queries take `4 · rows · columns · (head_dim + value_dim)` FLOP. Bound: FMA and
//! shared-memory loads, see `tile_ops/product.rs`.

use super::p_ds::{Pair, block_scores, pair_operands};
use crate::auxiliary::backward_kind::{BackwardKind, late_scale};
use crate::math::dropout::kernel::kept_scale;
use crate::math::inputs::{BackwardInputs, HeadSizes};
use crate::math::layout::{head_operand, head_rows};
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{Scoring, TileAndBlock, block_mask_shows};
use crate::math::side::Side;
use crate::math::visibility::{blocks_meet, is_whole, seq_info, visible_queries, within_bounds};
use crate::tile_ops::product::{
    accumulate, hold, new_stage, new_tile, row_factors, store_output, store_tile, sync_tiles,
    zero_output,
};
use crate::tile_ops::vec4::Vec4;
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn key_value_gradient<E: Float, C: Float, M: Numeric, F: Float, N: Size>(
    inputs: BackwardInputs<E, N>,
    scoring: Scoring<M, F>,
    key_gradient: &mut Tensor<Vector<E, N>>,
    value_gradient: &mut Tensor<Vector<E, N>>,
    grid: Grid,
    sizes: HeadSizes,
    #[comptime] kind: BackwardKind,
    #[define(E, C, M, F)] _elements: [ElemType; 4],
    #[define(N)] _vector: usize,
) {
    let query = &inputs.query;
    let key = &inputs.key;
    let value = &inputs.value;
    let output_gradient = &inputs.output_gradient;
    let rows = &inputs.lse_delta;
    let group = sizes.group;
    let head_dim = sizes.head_dim;
    let value_dim = sizes.value_dim;
    let index = CUBE_POS as u32;
    if index >= grid.cubes {
        terminate!();
    }
    let seq_lens = &scoring.seq_lens;
    let lengths_and_ids = &scoring.lengths_and_ids;
    let tiles = comptime!(kind.tiles);
    // Under a causal mask, more queries see the first keys than the last keys. Cubes take key tiles in ascending order, so
    // the tiles with the most queries start first, and the last tiles are short.
    let work_tile = work_tile(&grid, index, false);
    let batch = work_tile.batch;
    let kv_head = work_tile.head;
    let seq_info = seq_info(seq_lens, lengths_and_ids, batch, kind.structure);

    let first_row = (work_tile.tile * comptime!(tiles.rows as u32)) as i32;
    let end_row = min(first_row + comptime!(tiles.rows as i32), seq_lens.kv_len);
    // Leave out keys past the length of the sequence, because no query sees these keys.
    let exist = min(end_row, seq_info.length);
    let full = first_row + comptime!(tiles.rows as i32) <= exist;
    let queries = visible_queries(&seq_info, first_row, exist - 1i32, full);

    let key = head_operand(key, batch, kv_head, first_row, exist, head_dim);
    let value = head_operand(value, batch, kv_head, first_row, exist, value_dim);

    let mut stage = new_stage::<C>(tiles);
    let mut tile = new_tile::<C>(tiles);
    let mut lse_delta = Shared::<[Vec4]>::new_slice(comptime!(tiles.term_vectors()));
    let mut used = Shared::<[u32]>::new_slice(comptime!(tiles.columns()));
    let mut share = f32::new(comptime!(1.0 / tiles.p_scale()));
    if comptime!(kind.score.dropout && tiles.has_fragments()) {
        share *= kept_scale(&scoring.dropout);
    }
    let shares = row_factors(share, tiles);
    let scales = row_factors(late_scale(&scoring.arguments, tiles), tiles);
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dk = zero_output(tiles);
    let mut dv = zero_output(tiles);
    hold(&key, first_row, &mut stage, false, 0usize, tiles);
    hold(&value, first_row, &mut stage, false, 1usize, tiles);

    let block_size = comptime!(tiles.columns() as i32);
    let blocks = within_bounds(
        queries.first / block_size,
        block_count(queries.end, block_size),
        seq_lens,
        lengths_and_ids,
        batch,
        work_tile.tile,
        Side::Keys,
        kind.structure,
    );
    for group_head in 0..group {
        let head = kv_head * group + group_head;
        let query = head_operand(query, batch, head, queries.first, queries.end, head_dim);
        let output_gradient = head_operand(
            output_gradient,
            batch,
            head,
            queries.first,
            queries.end,
            value_dim,
        );
        let mut block = blocks.first;
        while block < blocks.end {
            let visited = blocks_meet(
                seq_lens,
                lengths_and_ids,
                batch,
                block as u32,
                work_tile.tile,
                kind.structure,
            );
            let visited = if comptime!(kind.structure.has_block_mask()) {
                let pair = TileAndBlock {
                    batch,
                    first_head: head,
                    last_head: head,
                    first_query: block * block_size,
                    last_query: (block + 1i32) * block_size - 1i32,
                    first_key: first_row,
                    last_key: end_row - 1i32,
                };
                visited && block_mask_shows(&scoring, &pair, kind.structure)
            } else {
                visited
            };
            if visited {
                let first = block * block_size;
                let pair = Pair {
                    batch,
                    head,
                    first_key: first_row,
                    first_query: first,
                    whole: is_whole(
                        &queries,
                        first,
                        seq_lens,
                        lengths_and_ids,
                        batch,
                        block as u32,
                        work_tile.tile,
                        block_size,
                        kind.structure,
                    ),
                };
                let pair_operands = pair_operands(query, key, value, output_gradient);
                block_scores(
                    &pair_operands,
                    rows,
                    &scoring,
                    &seq_info,
                    &pair,
                    &mut lse_delta,
                    &mut stage,
                    &mut s,
                    &mut dp,
                    kind,
                );
                store_tile(&s, &mut tile, 1usize, tiles);
                if comptime!(tiles.is_resident()) {
                    store_tile(&dp, &mut tile, 0usize, tiles);
                }
                sync_tiles(tiles);
                accumulate(
                    &tile,
                    &output_gradient,
                    first,
                    &mut stage,
                    &mut used,
                    &mut dv,
                    1usize,
                    comptime!(kind.score.leaves_masked(&kind.structure)),
                    tiles,
                );
                if comptime!(!tiles.is_resident()) {
                    sync_cube();
                    store_tile(&dp, &mut tile, 0usize, tiles);
                }
                accumulate(
                    &tile,
                    &query,
                    first,
                    &mut stage,
                    &mut used,
                    &mut dk,
                    0usize,
                    comptime!(kind.score.leaves_masked(&kind.structure)),
                    tiles,
                );
                if comptime!(tiles.is_direct()) {
                    // Wait until all units have read this tile in shared memory, since the next block overwrites the tile.
                    sync_cube();
                }
            }
            block += 1i32;
        }
    }
    sync_cube();
    let key_gradient_rows = head_rows(&*key_gradient, batch, kv_head, first_row, end_row, head_dim);
    store_output(
        &dk,
        &scales,
        &mut stage,
        key_gradient,
        &key_gradient_rows,
        first_row,
        false,
        tiles,
    );
    let value_gradient_rows = head_rows(
        &*value_gradient,
        batch,
        kv_head,
        first_row,
        end_row,
        value_dim,
    );
    store_output(
        &dv,
        &shares,
        &mut stage,
        value_gradient,
        &value_gradient_rows,
        first_row,
        false,
        tiles,
    );
}
