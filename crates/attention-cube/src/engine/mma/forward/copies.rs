//! How operands come to shared memory: each thread copies pieces of 16 bytes, and nobody waits for them before they are needed.

use crate::fragment::work_tile::{Tile, TileKind};
use cube_kit::ampere::copy::{PIECE, PIECE_BYTES, copy_piece, half_address, piece_address};
use cube_kit::hopper::ptx::element_address;
use cube_kit::hopper::{ROW_BYTES, SUBTILE};
use cubecl::prelude::*;

/// What the cubes copy from.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Sources<'query, 'key, 'value, E: Float> {
    pub query: &'query Tensor<E>,
    pub key: &'key Tensor<E>,
    pub value: &'value Tensor<E>,
}

/// A kernel's operands, as its functions pass them on.
#[cube]
pub(crate) fn sources<'query, 'key, 'value, E: Float>(
    query: &'query Tensor<E>,
    key: &'key Tensor<E>,
    value: &'value Tensor<E>,
) -> Sources<'query, 'key, 'value, E> {
    Sources::<'query, 'key, 'value, E> { query, key, value }
}

/// A head's rows of an operand, of which there are those from `first` to before `end`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct HeadRows {
    pub batch: u32,
    pub head: u32,
    pub first: i32,
    pub end: i32,
}

/// Pieces of a row of so many columns, filled up with zeros to whole steps of a product.
const fn pieces(columns: usize) -> usize {
    columns.div_ceil(2 * PIECE) * 2
}

/// Bytes that a piece has of a row's columns.
#[cube]
fn bytes_of(piece: u32, #[comptime] columns: usize) -> u32 {
    if comptime!(columns.is_multiple_of(2 * PIECE)) {
        u32::new(comptime!(PIECE_BYTES as i64))
    } else {
        bytes_left(comptime!(columns as i32) - (piece * comptime!(PIECE as u32)) as i32)
    }
}

/// Bytes that a piece has of a row with so many columns from it on; none where the row ends before it.
#[cube]
fn bytes_left(columns: i32) -> u32 {
    (clamp(columns, 0i32, comptime!(PIECE as i32)) * 2i32) as u32
}

/// Starts to copy a block of `rows` rows from `first_row` on; those that the head does not have become zeros.
#[cube]
pub(crate) fn copy_rows<E: Float>(
    source: &Tensor<E>,
    head: HeadRows,
    first_row: i32,
    target: u32,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
    #[comptime] units: usize,
) {
    let pieces = comptime!(pieces(columns));
    let total = comptime!(rows * pieces);
    // Rows of a step, after which a thread has the same piece of another row.
    let stride_rows = comptime!(units / pieces);
    let same_piece = comptime!(units.is_multiple_of(pieces));
    // The pieces of a row are permuted by its number among eight.
    let same_place = comptime!(same_piece && stride_rows.is_multiple_of(8));
    let own_row = UNIT_POS / comptime!(pieces as u32);
    let own_piece = UNIT_POS % comptime!(pieces as u32);
    let own_place = piece_address(target, own_row, own_piece, rows);
    let start = head.batch as usize * source.stride(0) + head.head as usize * source.stride(1);
    let stride = source.stride(2);
    #[unroll]
    for step in 0..comptime!(total.div_ceil(units)) {
        let index = UNIT_POS + comptime!((step * units) as u32);
        let whole = comptime!((step + 1) * units <= total);
        if whole || index < comptime!(total as u32) {
            let mut row = index / comptime!(pieces as u32);
            let mut piece = index % comptime!(pieces as u32);
            if comptime!(same_piece) {
                row = own_row + comptime!((step * stride_rows) as u32);
                piece = own_piece;
            }
            let place = if comptime!(same_place) {
                own_place + comptime!((step * stride_rows * ROW_BYTES) as u32)
            } else {
                piece_address(target, row, piece, rows)
            };
            let position = first_row + row as i32;
            let exists = position >= head.first && position < head.end;
            let readable = select(exists, position, head.first) as usize;
            let at = start + readable * stride + (piece * comptime!(PIECE as u32)) as usize;
            copy_piece(
                place,
                half_address::<E>(source, at as u64),
                select(exists, bytes_of(piece, columns), 0u32),
            );
        }
    }
}

/// Starts to copy a tile's queries; rows that do not exist become zeros.
#[cube]
pub(crate) fn copy_queries<E: Float>(
    query: &Tensor<E>,
    tile: &Tile,
    target: u32,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
    #[comptime] units: usize,
    #[comptime] kind: TileKind,
) {
    if comptime!(kind.heads > 1) {
        let all = comptime!(Columns {
            first: 0,
            count: columns.next_multiple_of(2 * PIECE),
            width: columns,
        });
        copy_query_columns::<E>(query, tile, target, rows, all, units, kind);
    } else {
        let head = HeadRows {
            batch: tile.batch,
            head: tile.first_head,
            first: 0i32.runtime(),
            end: tile.first_query + tile.rows,
        };
        copy_rows::<E>(query, head, tile.first_query, target, rows, columns, units);
    }
}

/// Some columns of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Columns {
    /// The first of them.
    pub first: usize,
    /// How many, whole steps of a product: zeros behind the operand's last.
    pub count: usize,
    /// Columns that the operand has.
    pub width: usize,
}

/// Starts to copy columns of a tile's queries, of one head or of several that share the tile; rows that do not exist become zeros.
#[cube]
pub(crate) fn copy_query_columns<E: Float>(
    query: &Tensor<E>,
    tile: &Tile,
    target: u32,
    #[comptime] rows: usize,
    #[comptime] columns: Columns,
    #[comptime] units: usize,
    #[comptime] kind: TileKind,
) {
    let pieces = comptime!((columns.count / PIECE) as u32);
    let total = comptime!((rows * columns.count / PIECE) as u32);
    let start = tile.batch as usize * query.stride(0);
    let mut index = UNIT_POS;
    while index < total {
        let row = index / pieces;
        let piece = index % pieces;
        let readable = min(row as i32, tile.rows - 1i32);
        let mut head = tile.first_head;
        let mut position = tile.first_query + readable;
        if comptime!(kind.heads > 1) {
            head = tile.first_head + (readable / tile.head_rows) as u32;
            position = readable % tile.head_rows;
        }
        let column = piece * comptime!(PIECE as u32);
        let at = start
            + head as usize * query.stride(1)
            + position as usize * query.stride(2)
            + comptime!(columns.first)
            + column as usize;
        let mut bytes = u32::new(comptime!(PIECE_BYTES as i64));
        if comptime!(columns.first + columns.count > columns.width) {
            let left = comptime!(columns.width as i32 - columns.first as i32) - column as i32;
            bytes = bytes_left(left);
        }
        copy_piece(
            piece_address(target, row, piece, rows),
            half_address::<E>(query, at as u64),
            select((row as i32) < tile.rows, bytes, 0u32),
        );
        index += comptime!(units as u32);
    }
}

/// A head's rows of an operand in global memory, of which there are those from `first` to before `end`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct HeadSource {
    pub address: u64,
    pub row_bytes: u64,
    pub first: i32,
    pub end: i32,
}

/// Where the rows of a head lie, whatever their elements are.
#[cube]
pub(crate) fn head_source<E: Numeric>(source: &Tensor<E>, head: HeadRows) -> HeadSource {
    let start = head.batch as usize * source.stride(0) + head.head as usize * source.stride(1);
    let element = elem_type_of::<E>();
    let bytes = comptime!(element.size());
    // SAFETY: only the address is taken.
    let address = element_address::<E>(
        unsafe { source.as_slice().as_ptr_unchecked() },
        start as u64,
        bytes,
    );
    HeadSource {
        address,
        row_bytes: source.stride(2) as u64 * comptime!(bytes as u64),
        first: head.first,
        end: head.end,
    }
}

/// A part of an operand's rows and columns, which is copied at once: rows by 16, columns by subtiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Section {
    /// Rows, also of its subtiles in shared memory.
    pub rows: usize,
    /// The first of the operand's columns.
    pub first_column: usize,
    /// Subtiles, filled up with zeros behind the operand's last column.
    pub subtiles: usize,
    /// Columns that the operand has.
    pub width: usize,
}

impl Section {
    /// Whether the operand has all columns of the subtiles before the `end`-th.
    const fn is_whole(&self, end: usize) -> bool {
        self.first_column + end * SUBTILE <= self.width
    }
}

/// Pieces of a subtile's row.
const SUBTILE_PIECES: usize = SUBTILE / PIECE;

/// Starts to copy a section from `first_row` on; rows that the head does not have become zeros. A thread has the same piece of many
/// rows and subtiles, so that most of their addresses differ by constants.
#[cube]
pub(crate) fn copy_section(
    source: HeadSource,
    first_row: i32,
    target: u32,
    #[comptime] section: Section,
    #[comptime] units: usize,
) {
    let at_once = comptime!((units / SUBTILE_PIECES).min(section.rows));
    let beside = comptime!(units / SUBTILE_PIECES / at_once);
    let row = UNIT_POS / comptime!(SUBTILE_PIECES as u32) % comptime!(at_once as u32);
    let side = UNIT_POS / comptime!((SUBTILE_PIECES * at_once) as u32);
    let piece = UNIT_POS % comptime!(SUBTILE_PIECES as u32);
    let subtile_bytes = comptime!((section.rows * ROW_BYTES) as u32);
    let to = piece_address(target, row, piece, section.rows) + side * subtile_bytes;
    let column = side * comptime!(SUBTILE as u32) + piece * comptime!(PIECE as u32);
    let position = first_row + row as i32;
    let mut from = source.address
        + position as u64 * source.row_bytes
        + (column * 2u32) as u64
        + comptime!(2 * section.first_column as u64);
    // Nothing is read for a row that does not exist, wherever it would be.
    // A tile whose window has left the last key behind has a block, and no keys.
    let existing = max(source.end - source.first, 0i32) as u32;
    let own = (position - source.first) as u32;
    #[unroll]
    for rows in 0..comptime!(section.rows / at_once) {
        let exists = own + comptime!((rows * at_once) as u32) < existing;
        #[unroll]
        for step in 0..comptime!(section.subtiles.div_ceil(beside)) {
            let first = comptime!(step * beside);
            let end = comptime!(first + beside);
            if comptime!(end <= section.subtiles)
                || side < comptime!((section.subtiles.saturating_sub(first)) as u32)
            {
                let mut bytes = u32::new(comptime!(PIECE_BYTES as i64));
                if comptime!(!section.is_whole(end)) {
                    let left = comptime!(
                        section.width as i32 - (section.first_column + first * SUBTILE) as i32
                    ) - column as i32;
                    bytes = bytes_left(left);
                }
                copy_piece(
                    to + comptime!(
                        first as u32 * subtile_bytes + (rows * at_once * ROW_BYTES) as u32
                    ),
                    from + comptime!((first * ROW_BYTES) as u64),
                    select(exists, bytes, 0u32),
                );
            }
        }
        from += source.row_bytes * comptime!(at_once as u64);
    }
}

/// A warp's part of a block of an operand. Of codes of 8 bits, two columns count as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WarpSection {
    /// Rows, also of its subtiles in shared memory.
    pub rows: usize,
    /// Columns, whole steps of a product.
    pub columns: usize,
    /// Columns that the operand has.
    pub width: usize,
    /// Whether the operand has all columns of every warp.
    pub is_whole: bool,
}

/// Rows that a warp copies a piece of at once.
const WARP_ROWS: usize = 32 / SUBTILE_PIECES;

/// Starts to copy a warp's part of an operand, the columns from `first_column` on of the rows from `first_row` on, by its own lanes; rows
/// that the head does not have, and columns behind the operand's last, become zeros.
#[cube]
pub(crate) fn copy_warp_section(
    source: HeadSource,
    first_row: i32,
    first_column: u32,
    target: u32,
    #[comptime] section: WarpSection,
) {
    let lane = UNIT_POS % 32u32;
    let row = lane / comptime!(SUBTILE_PIECES as u32);
    let piece = lane % comptime!(SUBTILE_PIECES as u32);
    let to = piece_address(target, row, piece, section.rows);
    // A row 4 below has its pieces permuted the other way by 4.
    let to_odd = to ^ comptime!((WARP_ROWS * PIECE_BYTES) as u32);
    let column = first_column + piece * comptime!(PIECE as u32);
    let position = first_row + row as i32;
    let mut from = source.address + position as u64 * source.row_bytes + (column * 2u32) as u64;
    let existing = max(source.end - source.first, 0i32) as u32;
    let own = (position - source.first) as u32;
    #[unroll]
    for step in 0..comptime!(section.rows / WARP_ROWS) {
        let exists = own + comptime!((step * WARP_ROWS) as u32) < existing;
        let place = if comptime!(step % 2 == 0) { to } else { to_odd };
        #[unroll]
        for subtile in 0..comptime!(section.columns.div_ceil(SUBTILE)) {
            let pieces = comptime!((section.columns - subtile * SUBTILE) / PIECE);
            if comptime!(pieces >= SUBTILE_PIECES) || piece < comptime!(pieces as u32) {
                let mut bytes = u32::new(comptime!(PIECE_BYTES as i64));
                if comptime!(!section.is_whole) {
                    let left = comptime!(section.width as i32 - (subtile * SUBTILE) as i32)
                        - column as i32;
                    bytes = bytes_left(left);
                }
                copy_piece(
                    place
                        + comptime!(
                            ((subtile * section.rows + step * WARP_ROWS) * ROW_BYTES) as u32
                        ),
                    from + comptime!((subtile * ROW_BYTES) as u64),
                    select(exists, bytes, 0u32),
                );
            }
        }
        from += source.row_bytes * comptime!(WARP_ROWS as u64);
    }
}
