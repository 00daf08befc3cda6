//! TMA copies of keys and values that lie in pages (PagedAttention): the lookup of the pages, and the copies.
//!
//! A box of a copy lies in one page, so a block may need several boxes. The producer looks up the pages before it waits
//! for a free buffer, because the lookup reads global memory.

use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::plan::box_rows;
use crate::math::visibility::SeqLens;
use cube_kit::ampere::gemv::read_word;
use cube_kit::hopper::tma::load_subtiles;
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::ptx::element_address;
use cubecl::prelude::*;

/// The page table, a kernel argument.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PageTable {
    /// The page indices, `[batch, pages of a sequence]`. Entry `n` of a sequence is the page whose first key is key
    /// `n · page_len` of the sequence.
    pub entries: OwnedTensor<i32>,
    /// The index of the last page in K and V.
    pub last_page: u32,
}

/// The address and the sizes of the page table. Without pages, the kernel reads none of the fields.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct PageSources {
    /// The address of the first entry.
    entries: u64,
    /// The number of entries between two sequences.
    stride: u32,
    /// The index of a sequence's last entry.
    last_entry: u32,
    /// The index of the last page in K and V.
    last_page: u32,
}

/// Returns the address and the sizes of the page table.
#[cube]
pub(crate) fn page_sources(page_table: &ComptimeOption<PageTable>) -> PageSources {
    #[comptime]
    match page_table {
        ComptimeOption::Some(table) => {
            // SAFETY: this expression only takes the address of the entries. `pages_of_rows` reads existing entries.
            let start = unsafe { table.entries.as_slice().as_ptr_unchecked() };
            PageSources {
                entries: element_address::<i32>(start, u64::new(0), 4usize),
                stride: table.entries.stride(0) as u32,
                last_entry: table.entries.shape(1) as u32 - 1u32,
                last_page: table.last_page,
            }
        }
        ComptimeOption::None => PageSources {
            entries: u64::new(0),
            stride: u32::new(0),
            last_entry: u32::new(0),
            last_page: u32::new(0),
        },
    }
}

/// The most boxes of a block: 128 keys in boxes of 16.
pub(crate) const MOST_BOXES: usize = 8;

/// Returns the page of each box of `rows` keys of sequence `batch`, beginning with key `first`. Without pages, returns
/// zeros.
///
/// Keys past the last entry of the page table lie in the page of the last entry. If an entry is not the index of an
/// existing page, the function returns the nearest existing index.
#[cube]
pub(crate) fn pages_of_rows(
    pages: &PageSources,
    batch: u32,
    first: i32,
    #[comptime] rows: usize,
    #[comptime] kind: TileKind,
) -> Vector<u32, Const<MOST_BOXES>> {
    let mut found = Vector::<u32, Const<MOST_BOXES>>::zeroed();
    if comptime!(kind.page_len > 0) {
        let of_box = comptime!(box_rows(rows, kind.page_len));
        let own = pages.entries + batch as u64 * pages.stride as u64 * 4u64;
        #[unroll]
        for index in 0..comptime!(rows / of_box) {
            let row = first as u32 + comptime!((index * of_box) as u32);
            let entry = min(row / comptime!(kind.page_len as u32), pages.last_entry);
            let page = read_word(own + entry as u64 * 4u64, 0usize) as i32;
            found.insert(index, min(max(page, 0i32) as u32, pages.last_page));
        }
    }
    found
}

/// Copies `rows` rows of K or V to `target`, as [`load_subtiles`] does. `batch` is the TMA coordinate of the sequence.
/// `pages` holds the result of [`pages_of_rows`]. `page_step` is 0 if all pages of the tensor are the same memory, else
/// 1.
#[cube]
pub(crate) fn load_rows(
    target: u32,
    map: u64,
    batch: u32,
    pages: Vector<u32, Const<MOST_BOXES>>,
    page_step: u32,
    head: u32,
    row: i32,
    barrier: u32,
    #[comptime] column: usize,
    #[comptime] subtiles: usize,
    #[comptime] rows: usize,
    #[comptime] whole: bool,
    #[comptime] kind: TileKind,
) {
    let of_box = comptime!(box_rows(rows, kind.page_len));
    #[unroll]
    for index in 0..comptime!(rows / of_box) {
        let (batch, row) = if comptime!(kind.page_len > 0) {
            let row = row + comptime!((index * of_box) as i32);
            (
                pages.extract(index) * page_step,
                row % comptime!(kind.page_len as i32),
            )
        } else {
            (batch, row)
        };
        load_subtiles(
            target + comptime!((index * of_box * ROW_BYTES) as u32),
            map,
            batch,
            head,
            row,
            barrier,
            column,
            subtiles,
            comptime!(rows * ROW_BYTES),
            // A box of several subtiles has the layout of shared memory only if it has all rows.
            comptime!(whole && (subtiles == 1 || of_box == rows)),
        );
    }
}

/// Returns the position from which on TMA has written zeros to the rows of K and V. TMA writes them past the end of the
/// keys. But keys that lie past the end in a page are old data.
#[cube]
pub(crate) fn zeros_from(seq_lens: &SeqLens, #[comptime] kind: TileKind) -> i32 {
    if comptime!(kind.page_len > 0) {
        i32::new(comptime!(i32::MAX as i64))
    } else {
        seq_lens.kv_len
    }
}
