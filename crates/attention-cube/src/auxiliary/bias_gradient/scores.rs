//! Computes the gradient of the bias. The gradient of a bias tile is the sum of dS (the gradient of the scores) over
//! all dimensions along which the bias is broadcast.
//!
//! Algorithm: a cube computes the gradient of one bias tile. The cube recomputes all score tiles that read this bias
//! tile, and sums dS in registers. A bias that is broadcast along queries has too few tiles to occupy the device.
//! Several cubes (splits) therefore divide the score tiles of a bias tile, and `sum_parts` adds the partial sums in a
//! fixed order. A bias that is broadcast along keys needs no scores: see `constant_bias_gradient`.
//!
//! Budget: the shared memory of the forward's operand tiles plus 16 bytes per unit, and `12 · rows_per_unit` registers
//! per unit. Work: `2 · rows · columns · (head_dim + value_dim)` FLOP per score tile of `rows` queries and `columns`
//! keys.

use crate::auxiliary::backward_kind::BackwardKind;
use crate::auxiliary::delta::kernel::row_lse_delta_of;
use crate::math::gradient::score_gradient;
use crate::math::inputs::{BackwardInputs, HeadSizes};
use crate::math::layout::head_operand;
use crate::math::rounding::rounded;
use crate::math::schedule::{Grid, block_count, work_tile};
use crate::math::score::{Scoring, TileAndBlock, block_mask_shows, is_visible};
use crate::math::score_mod::ScorePlace;
use crate::math::visibility::{blocks_meet, is_whole, seq_info, visible_keys};
use crate::tile_ops::product::{multiply_transposed, new_stage};
use crate::tile_ops::score_layout::{tile_column, tile_row};
use cubecl::prelude::*;

/// The dimensions along which the bias is broadcast, as compile-time settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Broadcast {
    pub batch: bool,
    pub heads: bool,
    pub queries: bool,
}

/// The runtime sizes that the kernel `bias_gradient` needs in addition to its launch grid and head sizes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct BiasCounts {
    pub batches: u32,
    pub q_heads: u32,
    /// The number of bias tiles along the keys.
    pub key_tiles: u32,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn bias_gradient<E: Float, M: Numeric, F: Float, G: Float, N: Size>(
    inputs: BackwardInputs<E, N>,
    scoring: Scoring<M, F>,
    gradient: &mut Tensor<G>,
    grid: Grid,
    sizes: HeadSizes,
    counts: BiasCounts,
    #[comptime] broadcast: Broadcast,
    #[comptime] kind: BackwardKind,
    #[define(E, M, F, G)] _elements: [ElemType; 4],
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
    let row_size = comptime!(tiles.rows as i32);
    let column_size = comptime!(tiles.columns() as i32);
    // The launch grid covers the tiles, heads and sequences of the bias. A broadcast dimension of the bias has size 1.
    let work_tile = work_tile(&grid, index, false);
    let own_row_tile = (work_tile.tile / counts.key_tiles) as i32;
    let own_key_tile = (work_tile.tile % counts.key_tiles) as i32;

    // The number of score tiles to sum: query tiles times query heads times sequences. Each of these three factors is 1
    // if the bias is not broadcast along the corresponding dimension.
    let mut row_tiles = 1u32;
    if comptime!(broadcast.queries) {
        row_tiles = block_count(seq_lens.q_len, row_size) as u32;
    }
    let mut heads = 1u32;
    if comptime!(broadcast.heads) {
        heads = counts.q_heads;
    }
    let mut summed = row_tiles * heads;
    if comptime!(broadcast.batch) {
        summed *= counts.batches;
    }

    let mut stage = new_stage::<f32>(tiles);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(tiles.sum_floats()));
    let mut s = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut dp = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    let mut sum = Array::<f32>::new(comptime!(tiles.scores_per_unit()));
    #[unroll]
    for index in 0..comptime!(tiles.scores_per_unit()) {
        sum[index] = 0.0f32;
    }
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);

    let first = own_key_tile * column_size;
    let mut item = work_tile.split;
    while item < summed {
        let row_tile = own_row_tile + (item % row_tiles) as i32;
        let head = work_tile.head + item / row_tiles % heads;
        let batch = work_tile.batch + item / row_tiles / heads;
        let kv_head = head / group;
        let seq_info = seq_info(seq_lens, lengths_and_ids, batch, kind.structure);
        let first_row = row_tile * row_size;
        let end_row = min(first_row + row_size, seq_lens.q_len);
        let full = first_row + row_size <= seq_lens.q_len;
        let keys = visible_keys(&seq_info, first_row, end_row - 1i32, full, kind.structure);
        let query = head_operand(query, batch, head, first_row, end_row, head_dim);
        let key = head_operand(key, batch, kv_head, keys.first, keys.end, head_dim);
        let output_gradient =
            head_operand(output_gradient, batch, head, first_row, end_row, value_dim);
        let value = head_operand(value, batch, kv_head, keys.first, keys.end, value_dim);
        let mut visited = first < keys.end && first + column_size > keys.first;
        if visited {
            visited = blocks_meet(
                seq_lens,
                lengths_and_ids,
                batch,
                row_tile as u32,
                own_key_tile as u32,
                kind.structure,
            );
        }
        let visited = if comptime!(kind.structure.has_block_mask()) {
            let pair = TileAndBlock {
                batch,
                first_head: head,
                last_head: head,
                first_query: first_row,
                last_query: end_row - 1i32,
                first_key: first,
                last_key: first + column_size - 1i32,
            };
            visited && block_mask_shows(&scoring, &pair, kind.structure)
        } else {
            visited
        };
        if visited {
            multiply_transposed(
                &query, first_row, &key, first, &mut stage, &mut s, tiles, false, 0usize,
            );
            multiply_transposed(
                &output_gradient,
                first_row,
                &value,
                first,
                &mut stage,
                &mut dp,
                tiles,
                false,
                1usize,
            );
            let whole = is_whole(
                &keys,
                first,
                seq_lens,
                lengths_and_ids,
                batch,
                row_tile as u32,
                own_key_tile as u32,
                column_size,
                kind.structure,
            );
            #[unroll]
            for k in 0..comptime!(tiles.rows_per_unit()) {
                let row = first_row + tile_row(unit_row, k, tiles) as i32;
                let lse_delta = row_lse_delta_of(rows, batch, head, row, seq_lens.q_len);
                #[unroll]
                for c in 0..comptime!(tiles.columns_per_unit()) {
                    let place = ScorePlace::new(
                        batch,
                        head,
                        row,
                        first + tile_column(unit_column, c, tiles) as i32,
                        seq_info.offset,
                    );
                    let visible = is_visible(whole, &scoring, &seq_info, &place, kind.structure);
                    let gradient = score_gradient(
                        s[comptime!(k * tiles.columns_per_unit() + c)],
                        dp[comptime!(k * tiles.columns_per_unit() + c)],
                        lse_delta,
                        visible,
                        &scoring,
                        place,
                        kind.score,
                        true,
                    );
                    sum[comptime!(k * tiles.columns_per_unit() + c)] += gradient.ds;
                }
            }
        }
        item += grid.splits;
    }

    let first_row = own_row_tile * row_size;
    let first_column = own_key_tile * column_size;
    let row_stride = gradient.stride(2);
    // The first dimension of `gradient` has one entry per pair of a split and a sequence of the bias. The entries of
    // split 0 come first, then the entries of split 1, and so on.
    let part = work_tile.split * (grid.planes / grid.heads) + work_tile.batch;
    let target = part as usize * gradient.stride(0) + work_tile.head as usize * gradient.stride(1);
    if comptime!(broadcast.queries) {
        // Add up the score gradients (dS) of each column. First, each unit adds up the rows that it holds of a column.
        // Then one unit per column adds up these partial sums.
        sync_cube();
        #[unroll]
        for c in 0..comptime!(tiles.columns_per_unit()) {
            let mut column_sum = 0.0f32;
            #[unroll]
            for k in 0..comptime!(tiles.rows_per_unit()) {
                column_sum += sum[comptime!(k * tiles.columns_per_unit() + c)];
            }
            partial[unit_row * comptime!(tiles.columns()) + tile_column(unit_column, c, tiles)] =
                column_sum;
        }
        sync_cube();
        let column = UNIT_POS as usize;
        if column < comptime!(tiles.columns()) && first_column + (column as i32) < seq_lens.kv_len {
            let mut column_sum = 0.0f32;
            for y in 0..comptime!(tiles.row_units()) {
                column_sum += partial[y * comptime!(tiles.columns()) + column];
            }
            gradient[target + first_column as usize + column] = rounded::<G>(column_sum);
        }
    } else {
        #[unroll]
        for k in 0..comptime!(tiles.rows_per_unit()) {
            let row = first_row + tile_row(unit_row, k, tiles) as i32;
            #[unroll]
            for c in 0..comptime!(tiles.columns_per_unit()) {
                let column = first_column + tile_column(unit_column, c, tiles) as i32;
                if row < seq_lens.q_len && column < seq_lens.kv_len {
                    gradient[target + row as usize * row_stride + column as usize] =
                        rounded::<G>(sum[comptime!(k * tiles.columns_per_unit() + c)]);
                }
            }
        }
    }
}
