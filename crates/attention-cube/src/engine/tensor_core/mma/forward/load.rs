//! Asynchronous copies (`cp.async`) of operands to shared memory, in pieces of 16 bytes.

use crate::engine::tensor_core::common::tile_scheduler::{Tile, TileKind};
use cube_kit::ampere::cp_async::{PIECE, PIECE_BYTES, copy_piece, half_address, piece_address};
use cube_kit::nvidia::ptx::element_address;
use cube_kit::nvidia::{ROW_BYTES, SUBTILE};
use cubecl::prelude::*;

/// The tensors that a CTA copies from: query `[batch, q_heads, q_len, head_dim]`, key `[batch, kv_heads, kv_len, head_dim]`
/// and value `[batch, kv_heads, kv_len, value_dim]`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Sources<'query, 'key, 'value, E: Float> {
    pub query: &'query Tensor<E>,
    pub key: &'key Tensor<E>,
    pub value: &'value Tensor<E>,
}

/// Bundles a kernel's operands into one argument.
#[cube]
pub(crate) fn sources<'query, 'key, 'value, E: Float>(
    query: &'query Tensor<E>,
    key: &'key Tensor<E>,
    value: &'value Tensor<E>,
) -> Sources<'query, 'key, 'value, E> {
    Sources::<'query, 'key, 'value, E> { query, key, value }
}

/// One head of an operand: the indices of its sequence (`batch`) and of the head. Only the rows `first..end` of the
/// head exist. Copies write zeros for all other rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct HeadRows {
    pub batch: u32,
    pub head: u32,
    pub first: i32,
    pub end: i32,
}

/// The number of 16-byte pieces that hold a row of `columns` columns in shared memory. Zeros pad the row to whole `mma`
/// steps of 16 columns.
const fn pieces(columns: usize) -> usize {
    columns.div_ceil(2 * PIECE) * 2
}

/// Returns how many bytes of the `piece`-th 16-byte piece of a row hold columns. The row has `columns` columns. The
/// remaining bytes of the piece are padding.
#[cube]
fn bytes_of(piece: u32, #[comptime] columns: usize) -> u32 {
    if comptime!(columns.is_multiple_of(2 * PIECE)) {
        u32::new(comptime!(PIECE_BYTES as i64))
    } else {
        bytes_left(comptime!(columns as i32) - (piece * comptime!(PIECE as u32)) as i32)
    }
}

/// Returns the number of bytes that a copy reads for one 16-byte piece of a row. `columns` is the number of columns
/// from the start of the piece to the end of the row. If the row ends before the piece, `columns` is 0 or negative.
#[cube]
fn bytes_left(columns: i32) -> u32 {
    (clamp(columns, 0i32, comptime!(PIECE as i32)) * 2i32) as u32
}

/// Starts the copy of `rows` rows, from `first_row` on, to shared memory at `target`. The copy writes zeros for rows
/// that do not exist in the head.
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
    // `units` is the number of threads, and `pieces` the number of 16-byte pieces per row. If `units` is a multiple of
    // `pieces`, the index of the piece in its row is the same in all iterations of a thread. The thread then advances
    // by `stride_rows` rows per iteration.
    let stride_rows = comptime!(units / pieces);
    let same_piece = comptime!(units.is_multiple_of(pieces));
    // The swizzle depends on the row number modulo 8. If `stride_rows` is also a multiple of 8, all pieces of a thread
    // lie at the same swizzled offset from the starts of their rows.
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

/// Starts the copy of a tile's queries. The copy writes zeros for rows that do not exist.
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

/// A range of an operand's columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Columns {
    /// The first column of the range.
    pub first: usize,
    /// The number of columns in the range, a multiple of 16. Columns past the operand's last column become zeros.
    pub count: usize,
    /// The number of columns in the operand.
    pub width: usize,
}

/// Starts the copy of a column range of a tile's queries. The queries of a tile belong to one head or to several heads.
/// The copy writes zeros for rows that do not exist.
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

/// One head of an operand: its address in global memory, and its row stride in bytes. Only the rows `first..end` of the
/// head exist. Copies write zeros for all other rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct HeadSource {
    pub address: u64,
    pub row_bytes: u64,
    pub first: i32,
    pub end: i32,
}

/// Computes the address and the row stride of a head, for elements of any type.
#[cube]
pub(crate) fn head_source<E: Numeric>(source: &Tensor<E>, head: HeadRows) -> HeadSource {
    let start = head.batch as usize * source.stride(0) + head.head as usize * source.stride(1);
    let element = elem_type_of::<E>();
    let bytes = comptime!(element.size());
    // SAFETY: this expression only takes the address of `source`. Later copies read only the rows `head.first..head.end` of
    // the head at element `start`.
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

/// A *section*: the rows and columns of an operand that one call of [`copy_section`] copies. The number of rows is a
/// multiple of 16. The columns form whole *subtiles*, which are groups of 64 columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Section {
    /// The number of operand rows that one call copies. Each subtile (64 columns) in shared memory has this number of
    /// rows.
    pub rows: usize,
    /// The first operand column that one call copies.
    pub first_column: usize,
    /// The number of 64-column subtiles that one call copies. Columns past the operand's last column become zeros.
    pub subtiles: usize,
    /// The number of columns in the operand.
    pub width: usize,
}

impl Section {
    /// True if the operand has all columns of the first `end` subtiles (64 columns each) of the section. The copy then
    /// writes no zeros for missing columns.
    const fn is_whole(&self, end: usize) -> bool {
        self.first_column + end * SUBTILE <= self.width
    }
}

/// The number of 16-byte pieces per subtile row.
const SUBTILE_PIECES: usize = SUBTILE / PIECE;

/// Starts the copy of a section (some rows and columns of an operand). `first_row` is the section's first row. The copy
/// writes zeros for rows that do not exist in the head. In every row that a thread copies, the thread's 16-byte piece
/// has the same index. Most addresses of the thread therefore differ by compile-time constants.
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
    // If a row does not exist, the copy reads nothing, so the row's address may be arbitrary. If the window of a tile
    // begins past the last key, `source.end` is less than `source.first`, and `existing` is 0.
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

/// A *warp section*: the rows and columns of an operand block that one warp copies. Here a column means 16 bits. An
/// int8 code has 8 bits, so two codes count as one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WarpSection {
    /// The number of operand rows that a warp copies. Each subtile (64 columns) in shared memory has this number of
    /// rows.
    pub rows: usize,
    /// The number of operand columns that a warp copies, a multiple of 16.
    pub columns: usize,
    /// The number of columns in the operand.
    pub width: usize,
    /// True if the columns of all warps lie inside the operand, so that the copies need no zeros.
    pub is_whole: bool,
}

/// The number of rows that a warp copies in one iteration. Each lane copies one 16-byte piece per iteration.
const WARP_ROWS: usize = 32 / SUBTILE_PIECES;

/// Starts a warp's copy of some rows and columns of an operand. The copied rows begin with `first_row`, and the copied
/// columns with `first_column`. All lanes of the warp take part. The copy writes zeros for rows that do not exist in
/// the head, and for columns past the operand's last column.
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
    // The swizzle XORs the index of a piece with the row number modulo 8. Each iteration advances by 4 rows. In odd
    // iterations, the swizzle therefore flips bit 2 of the piece's index.
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
