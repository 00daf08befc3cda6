//! Copies LSE and delta to shared memory, and returns which rows of the tile's head exist.

use crate::engine::tensor_core::common::stationary_tile::Stationary;
use crate::engine::tensor_core::mma::forward::load::HeadRows;
use crate::math::side::Side;
use cube_kit::ampere::cp_async::{PIECE_BYTES, copy_piece};
use cube_kit::nvidia::ptx::word_address;
use cubecl::prelude::*;

/// The number of f32 values in one 16-byte piece of a copy. These values are the LSE of consecutive queries, or the
/// delta of consecutive queries.
const PIECE_TERMS: usize = PIECE_BYTES / 4;

/// Starts the copy of the first `count` of the five rows of `lse_delta`, for `queries` queries from `first_query` on.
/// In shared memory, the values of row 0 for all these queries come first, then the values of row 1, and so on. The
/// copy writes zeros for queries past the padded `q_len`.
///
/// # Shapes
/// `lse_delta` is `[batch, q_heads, 5, padded q_len]`, f32.
#[cube]
pub(super) fn copy_lse_delta(
    lse_delta: &Tensor<f32>,
    batch: u32,
    head: u32,
    first_query: u32,
    target: u32,
    #[comptime] queries: usize,
    #[comptime] count: usize,
) {
    let pieces = comptime!((queries / PIECE_TERMS) as u32);
    if UNIT_POS < comptime!(count as u32) * pieces {
        let term = UNIT_POS / pieces;
        let query = first_query + UNIT_POS % pieces * comptime!(PIECE_TERMS as u32);
        let exists = query < lse_delta.shape(3) as u32;
        let at = batch as usize * lse_delta.stride(0)
            + head as usize * lse_delta.stride(1)
            + term as usize * lse_delta.stride(2)
            + query as usize;
        // SAFETY: this expression only takes the address of `lse_delta`. If `exists`, the 4 values copied from index
        // `at` lie inside the tensor, because their queries are below the padded `q_len`. Otherwise the copy reads
        // nothing.
        let source = word_address::<f32>(
            unsafe { lse_delta.as_slice().as_ptr_unchecked() },
            select(exists, at as u64, 0u64),
        );
        copy_piece(
            target + UNIT_POS * comptime!(PIECE_BYTES as u32),
            source,
            select(exists, comptime!(PIECE_BYTES as u32), 0u32),
        );
    }
}

/// Returns the tile's batch and head, and the range of rows that exist in this head. The rows are queries or keys,
/// according to `side`.
#[cube]
pub(super) fn stationary_head(tile: &Stationary, #[comptime] side: Side) -> HeadRows {
    let end = if comptime!(side == Side::Queries) {
        tile.seq_info.q_len
    } else {
        tile.seq_info.length
    };
    HeadRows {
        batch: tile.batch,
        head: tile.head,
        first: 0i32.runtime(),
        end,
    }
}
