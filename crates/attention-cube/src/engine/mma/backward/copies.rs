//! How the queries' terms come to shared memory, and which rows of the operands do.

use crate::engine::mma::forward::copies::HeadRows;
use crate::fragment::stationary::Stationary;
use crate::math::side::Side;
use cube_kit::ampere::copy::{PIECE_BYTES, copy_piece};
use cube_kit::hopper::ptx::word_address;
use cubecl::prelude::*;

/// Terms of a piece.
const PIECE_TERMS: usize = PIECE_BYTES / 4;

/// Starts to copy so many terms of each of `queries` queries, the first of all of these first. They are padded with zeros to whole
/// pieces.
#[cube]
pub(super) fn copy_terms(
    terms: &Tensor<f32>,
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
        let exists = query < terms.shape(3) as u32;
        let at = batch as usize * terms.stride(0)
            + head as usize * terms.stride(1)
            + term as usize * terms.stride(2)
            + query as usize;
        // SAFETY: only the address is taken.
        let source = word_address::<f32>(
            unsafe { terms.as_slice().as_ptr_unchecked() },
            select(exists, at as u64, 0u64),
        );
        copy_piece(
            target + UNIT_POS * comptime!(PIECE_BYTES as u32),
            source,
            select(exists, comptime!(PIECE_BYTES as u32), 0u32),
        );
    }
}

/// The rows that there are of the head whose rows a tile holds.
#[cube]
pub(super) fn held_head(tile: &Stationary, #[comptime] side: Side) -> HeadRows {
    let end = if comptime!(side == Side::Queries) {
        tile.sight.q_len
    } else {
        tile.sight.length
    };
    HeadRows {
        batch: tile.batch,
        head: tile.head,
        first: 0i32.runtime(),
        end,
    }
}
