//! The pages of keys and values: the lookup of a block's page, and the addresses of the page's rows.

use crate::engine::tensor_core::common::scoring::ForwardOperands;
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::forward::load::HeadSource;
use crate::engine::tensor_core::mma::plan::split_n::MmaSplitNTiles;
use cube_kit::ampere::gemv::read_word;
use cube_kit::nvidia::ptx::element_address;
use cubecl::prelude::*;

/// The page table of a sequence, and the distances in bytes between consecutive pages of keys, values and scales. If
/// keys and values do not lie in pages, the kernel uses none of the fields.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct PageSources {
    /// The address of the sequence's first entry in the page table.
    pub entries: u64,
    /// The index of the last entry in the sequence's row of the page table.
    pub last_entry: u32,
    /// The index of the last page in the tensors of keys and values.
    pub last_page: u32,
    pub key_bytes: u64,
    pub value_bytes: u64,
    pub key_scale_bytes: u64,
    pub value_scale_bytes: u64,
}

/// Returns the index in the first dimension of K and V that the kernel uses to compute a tile's addresses. Without
/// pages, the index is `batch`. With pages, the first dimension counts pages. The index is then 0, because
/// [`paged_head`] later adds the offset of the page.
#[cube]
pub(super) fn first_sequence(batch: u32, #[comptime] kind: TileKind) -> u32 {
    if comptime!(kind.page_len > 0) {
        u32::new(0)
    } else {
        batch
    }
}

/// Returns the page table of sequence `batch`, and the distances between pages.
#[cube]
pub(super) fn page_sources<E: Float, W: Numeric>(
    inputs: &ForwardOperands<E, W>,
    batch: u32,
) -> PageSources {
    #[comptime]
    match &inputs.page_table {
        ComptimeOption::Some(page_table) => {
            let words = elem_type_of::<W>();
            let bytes = comptime!(words.size() as u64);
            let first = batch as usize * page_table.stride(0);
            // SAFETY: this expression only takes the address of `page_table`. `page_of_block` reads entries of sequence
            // `batch`.
            let entries = element_address::<i32>(
                unsafe { page_table.as_slice().as_ptr_unchecked() },
                first as u64,
                4usize,
            );
            PageSources {
                entries,
                last_entry: page_table.shape(1) as u32 - 1u32,
                last_page: inputs.key.shape(0) as u32 - 1u32,
                key_bytes: inputs.key.stride(0) as u64 * bytes,
                value_bytes: inputs.value.stride(0) as u64 * bytes,
                key_scale_bytes: scale_bytes(&inputs.key_scales),
                value_scale_bytes: scale_bytes(&inputs.value_scales),
            }
        }
        ComptimeOption::None => PageSources {
            entries: u64::new(0),
            last_entry: u32::new(0),
            last_page: u32::new(0),
            key_bytes: u64::new(0),
            value_bytes: u64::new(0),
            key_scale_bytes: u64::new(0),
            value_scale_bytes: u64::new(0),
        },
    }
}

/// Returns the distance in bytes between the scales of two consecutive pages, or 0 without scales.
#[cube]
fn scale_bytes(scales: &ComptimeOption<OwnedTensor<f32>>) -> u64 {
    #[comptime]
    match scales {
        ComptimeOption::Some(scales) => scales.stride(0) as u64 * 4u64,
        ComptimeOption::None => u64::new(0),
    }
}

/// Returns the index of the page that holds a block of keys, or 0 without pages.
///
/// For a block past the last entry in the sequence's row of the page table, the function returns the page of that last
/// entry. If an entry is not the index of an existing page, the function returns the nearest existing index. Copies
/// therefore read only inside the tensors.
#[cube]
pub(super) fn page_of_block(
    pages: &PageSources,
    block: i32,
    #[comptime] tiles: MmaSplitNTiles,
    #[comptime] kind: TileKind,
) -> u32 {
    if comptime!(kind.page_len > 0) {
        let blocks_of_page = comptime!((kind.page_len / tiles.keys) as u32);
        let entry = min(block as u32 / blocks_of_page, pages.last_entry);
        let page = read_word(pages.entries + entry as u64 * 4u64, 0usize) as i32;
        min(max(page, 0i32) as u32, pages.last_page)
    } else {
        u32::new(0)
    }
}

/// Returns the address and the row stride of the head's rows in page `page`. The address is shifted: row `n` of the
/// sequence lies at the returned address plus `n` row strides. The caller may read only rows of this page.
///
/// `source` must begin at page 0, and `page` must hold row `row` of the sequence. If keys and values do not lie in
/// pages, the function returns `source`.
#[cube]
pub(super) fn paged_head(
    source: HeadSource,
    page_bytes: u64,
    page: u32,
    row: i32,
    #[comptime] kind: TileKind,
) -> HeadSource {
    if comptime!(kind.page_len > 0) {
        let length = comptime!(kind.page_len as i32);
        let first_row = row / length * length;
        // The subtraction of `first_row · row_bytes` may make the u64 address wrap around below 0. The caller then adds
        // the offset of a row that lies in the page. This addition wraps the address back.
        HeadSource {
            address: source.address + page as u64 * page_bytes
                - first_row as u64 * source.row_bytes,
            row_bytes: source.row_bytes,
            first: source.first,
            end: source.end,
        }
    } else {
        source
    }
}
