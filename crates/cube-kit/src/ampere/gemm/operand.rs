//! The operands of a GEMM in shared memory: the copies of chunks, and the addresses of `ldmatrix`.
//!
//! An operand that is contiguous along the inner dimension has rows of 32 inner elements, four 16-byte pieces each. An
//! operand that is contiguous along its outer dimension has 64-column subtiles of 32 rows. In both layouts the pieces
//! of a row are permuted, so that the 8 rows of an `ldmatrix` lie in different banks.

use super::plan::Tiles;
use crate::ampere::cp_async::{PIECE, PIECE_BYTES, copy_piece, narrow_piece_offset, piece_address};
use crate::nvidia::ROW_BYTES;
use crate::nvidia::matrix::Major;
use crate::nvidia::ptx::{load_matrices, load_matrices_transposed};
use cubecl::prelude::*;

/// An operand in global memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operand {
    /// The address of the operand's first element.
    pub start: u64,
    /// The distance between rows in memory, in elements.
    pub stride: u32,
    /// The size of the outer dimension.
    pub outer: u32,
    /// The size of the inner dimension.
    pub inner: u32,
}

/// Starts the copies of a chunk of an operand: `extent` outer elements from `first_outer` on, and 32 inner elements
/// from `first_inner` on. Elements beyond the operand become zeros.
#[cube]
pub(super) fn copy_chunk(
    target: u32,
    operand: Operand,
    first_outer: u32,
    first_inner: u32,
    #[comptime] extent: usize,
    #[comptime] major: Major,
    #[comptime] units: usize,
) {
    let (rows, columns) = comptime!(match major {
        Major::Inner => (extent, Tiles::DEPTH),
        Major::Outer => (Tiles::DEPTH, extent),
    });
    let of_row = comptime!((columns / PIECE) as u32);
    let pieces = comptime!(rows * columns / PIECE);
    #[unroll]
    for turn in 0..comptime!(pieces.div_ceil(units)) {
        let index = comptime!((turn * units) as u32) + UNIT_POS;
        if comptime!((turn + 1) * units <= pieces) || index < comptime!(pieces as u32) {
            let row = index / of_row;
            let piece = index % of_row;
            let (to, all_row, all_column, row_end, column_end) = if comptime!(major == Major::Inner)
            {
                (
                    target + narrow_piece_offset(row, piece),
                    first_outer + row,
                    first_inner + piece * comptime!(PIECE as u32),
                    operand.outer,
                    operand.inner,
                )
            } else {
                (
                    piece_address(target, row, piece, Tiles::DEPTH),
                    first_inner + row,
                    first_outer + piece * comptime!(PIECE as u32),
                    operand.inner,
                    operand.outer,
                )
            };
            let left = column_end - min(all_column, column_end);
            let is_row = all_row < row_end;
            let bytes = select(
                is_row,
                min(2u32 * left, comptime!(PIECE_BYTES as u32)),
                0u32,
            );
            // A copy of no bytes reads nothing, but takes an address inside the operand all the same.
            let from_row = select(bytes > 0u32, all_row, 0u32);
            let from_column = select(bytes > 0u32, all_column, 0u32);
            let element = u64::cast_from(from_row) * u64::cast_from(operand.stride)
                + u64::cast_from(from_column);
            copy_piece(to, operand.start + element * 2u64, bytes);
        }
    }
}

/// Loads the left operand of an `mma.sync`: 16 rows from `row` on, and 16 inner elements. The operand starts at
/// `start`, and `step` is the index of the group of 16 inner elements.
#[cube]
pub(super) fn left_fragment(
    start: u32,
    row: u32,
    #[comptime] step: usize,
    #[comptime] major: Major,
) -> Vector<u32, Const<4>> {
    let lane = UNIT_POS % 32u32;
    if comptime!(major == Major::Inner) {
        let piece = comptime!(2 * step as u32) + lane / 16u32;
        load_matrices(start + narrow_piece_offset(row + lane % 16u32, piece))
    } else {
        let inner = comptime!(16 * step as u32) + lane % 8u32 + lane / 16u32 * 8u32;
        let piece = row / comptime!(PIECE as u32) + lane / 8u32 % 2u32;
        load_matrices_transposed(piece_address(start, inner, piece, Tiles::DEPTH))
    }
}

/// Loads the right operands of two `mma.sync`: 16 columns from `column` on, and 16 inner elements. The first two words
/// are the operand of the first 8 columns. See [`left_fragment`].
#[cube]
pub(super) fn right_fragments(
    start: u32,
    column: u32,
    #[comptime] step: usize,
    #[comptime] major: Major,
) -> Vector<u32, Const<4>> {
    let lane = UNIT_POS % 32u32;
    if comptime!(major == Major::Inner) {
        let piece = comptime!(2 * step as u32) + lane / 8u32 % 2u32;
        load_matrices(
            start + narrow_piece_offset(column + lane % 8u32 + lane / 16u32 * 8u32, piece),
        )
    } else {
        let inner = comptime!(16 * step as u32) + lane % 16u32;
        let piece = column / comptime!(PIECE as u32) + lane / 16u32;
        load_matrices_transposed(piece_address(start, inner, piece, Tiles::DEPTH))
    }
}

/// Returns the offset of a pair of neighboring output columns in the staged output, in 64-column subtiles of a tile's
/// rows. `column` is even.
#[cube]
pub(super) fn pair_offset(row: u32, column: u32) -> u32 {
    let piece = column / comptime!(PIECE as u32);
    piece_address(0u32, row, piece, Tiles::ROWS) + column % comptime!(PIECE as u32) * 2u32
}

/// The bytes of a subtile of the staged output.
pub(super) const OUTPUT_SUBTILE_BYTES: usize = Tiles::ROWS * ROW_BYTES;
