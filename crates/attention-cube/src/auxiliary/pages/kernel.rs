//! Copies rows between pages and contiguous tensors `[batch, heads, length, columns]`.
//!
//! Schedule: a unit copies one vector at a time. In [`gather_pages`], the cubes of a head divide the head's visible rows.
//! [`append_rows`] has one unit per vector of the new rows. Budget: no shared memory, and one vector in registers. Bound:
//! memory.

use crate::math::layout::{head_rows, page_in, row_offset};
use crate::math::visibility::{SeqLens, Structure, seq_info, visible_keys};
use cubecl::prelude::*;

/// The number of units in a cube.
pub(super) const UNITS: usize = 256;

/// The runtime sizes of [`gather_pages`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct GatherSizes {
    pub heads: u32,
    /// The number of heads over all sequences.
    pub planes: usize,
    /// The number of rows per head in the target tensor.
    pub length: u32,
    pub columns: u32,
    /// The number of vectors per row.
    pub row_vectors: u32,
    /// The number of rows that a cube copies at once.
    pub rows_of_cube: u32,
    pub cubes_of_head: u32,
}

/// Copies rows from the pages to the contiguous `target`: each row that at least one query of the sequence sees. Causal
/// mask, window and length decide which rows these are. All other rows of the target stay uninitialized.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn gather_pages<E: Numeric, N: Size>(
    pages: &Tensor<Vector<E, N>>,
    page_table: &Tensor<i32>,
    lengths: ComptimeOption<OwnedTensor<i32>>,
    target: &mut Tensor<Vector<E, N>>,
    seq_lens: SeqLens,
    sizes: GatherSizes,
    #[comptime] page_len: usize,
    #[comptime] structure: Structure,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let plane = CUBE_POS / sizes.cubes_of_head as usize;
    if plane >= sizes.planes {
        terminate!();
    }
    let of_head = (CUBE_POS % sizes.cubes_of_head as usize) as u32;
    let batch = plane as u32 / sizes.heads;
    let head = plane as u32 % sizes.heads;
    let seq_info = seq_info(&seq_lens, &lengths, batch, structure);
    let seen = visible_keys(&seq_info, 0i32, seq_lens.q_len - 1i32, false, structure);
    let end = max(seen.end, 0i32) as u32;
    let size = target.vector_size();
    let page_size = comptime!(page_len as u32);
    let rows_of_page = head_rows(pages, 0u32, head, 0i32, page_len as i32, sizes.columns);
    let mut row = seen.first as u32 + of_head * sizes.rows_of_cube;
    while row < end {
        let count = min(sizes.rows_of_cube, end - row) * sizes.row_vectors;
        let mut index = UNIT_POS;
        while index < count {
            let position = row + index / sizes.row_vectors;
            let vector = (index % sizes.row_vectors) as usize;
            let page = page_in(page_table, pages, batch, position / page_size);
            let from = row_offset(&rows_of_page, position % page_size, false)
                + page as usize * pages.stride(0)
                + vector * size * rows_of_page.column_stride;
            let to = (plane * sizes.length as usize + position as usize)
                * sizes.row_vectors as usize
                + vector;
            target[to] = pages[from / size];
            index += comptime!(UNITS as u32);
        }
        row += sizes.cubes_of_head * sizes.rows_of_cube;
    }
}

/// The runtime sizes of [`append_rows`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct AppendSizes {
    pub heads: u32,
    /// The number of new rows per sequence.
    pub new: u32,
    pub columns: u32,
    /// The number of vectors per row.
    pub row_vectors: u32,
    /// The number of vectors in all new rows together.
    pub vectors: usize,
}

/// Writes the new rows of each sequence into the sequence's pages. A row is skipped if its place lies past the last
/// page of the sequence. A row is also skipped if the page table entry for its place is not the index of a page. With
/// `counts`, only the first `counts[batch]` new rows of a sequence are written.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn append_rows<E: Numeric, N: Size>(
    rows: &Tensor<Vector<E, N>>,
    page_table: &Tensor<i32>,
    starts: &Tensor<i32>,
    counts: ComptimeOption<OwnedTensor<i32>>,
    pages: &mut Tensor<Vector<E, N>>,
    sizes: AppendSizes,
    #[comptime] page_len: usize,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let index = ABSOLUTE_POS;
    if index >= sizes.vectors {
        terminate!();
    }
    let size = rows.vector_size();
    let vector = index % sizes.row_vectors as usize;
    let row = index / sizes.row_vectors as usize;
    let new = (row % sizes.new as usize) as u32;
    let plane = row / sizes.new as usize;
    let head = plane as u32 % sizes.heads;
    let batch = plane as u32 / sizes.heads;
    let start = max(starts[batch as usize], 0i32) as u32;
    let mut own = sizes.new as i32;
    #[comptime]
    match &counts {
        ComptimeOption::Some(counts) => own = counts[batch as usize],
        ComptimeOption::None => {}
    }
    let number = (start + new) / comptime!(page_len as u32);
    let mut page = i32::new(-1);
    if (new as i32) < own && number < page_table.shape(1) as u32 {
        page = page_table[batch as usize * page_table.stride(0) + number as usize];
    }
    if page >= 0i32 && (page as usize) < pages.shape(0) {
        let slot = (start + new) % comptime!(page_len as u32);
        let of_head = head_rows(rows, batch, head, 0i32, sizes.new as i32, sizes.columns);
        let from = row_offset(&of_head, new, false) + vector * size * of_head.column_stride;
        let to = page as usize * pages.stride(0)
            + head as usize * pages.stride(1)
            + slot as usize * pages.stride(2)
            + vector * size;
        pages[to / size] = rows[from / size];
    }
}
