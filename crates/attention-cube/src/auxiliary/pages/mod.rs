//! Launches the kernels that copy pages to contiguous keys and values, and that append rows to pages.

mod kernel;

use self::kernel::{AppendSizesLaunch, GatherSizesLaunch, UNITS, append_rows, gather_pages};
use crate::auxiliary::lengths::{BoundsOffsets, contiguous_integers, is_as_read};
use crate::kernel_args::is_in_vectors;
use crate::math::visibility::Structure;
use crate::problem::AttentionProblem;
use crate::types::tensors::AppendPlaces;
use burn::backend::{cubecl::dtype_to_storage_type, ops::IntTensorOps};
use burn::tensor::{IntDType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// The largest number of cubes in a launch of `gather_pages` over at most this number of heads. A launch over more
/// heads has one cube per head. The limit exceeds the number of cubes that a device runs at once. The limit is still so
/// small that cubes without rows cost little.
const MOST_CUBES: usize = 4096;

/// The number of vectors that a unit copies before its cube goes on to the next group of rows.
const VECTORS_OF_UNIT: usize = 4;

/// Returns the page table in the layout that kernels read: i32, with contiguous rows.
pub(crate) fn page_table_as_read(page_table: &CubeTensor, pages: usize) -> CubeTensor {
    contiguous_integers(page_table, pages.saturating_sub(1))
}

/// Copies pages of keys or values to a contiguous tensor `[batch, heads, kv_len, columns]`. If causal mask, window and
/// `lengths` hide a row from all queries of the sequence, the row stays uninitialized and may be NaN.
///
/// `page_table` and `lengths` must be in the layout that kernels read.
pub(crate) fn gathered_where_seen(
    pages: CubeTensor,
    page_table: &CubeTensor,
    problem: &AttentionProblem,
    lengths: Option<CubeTensor>,
) -> CubeTensor {
    let shape = pages.meta.shape();
    let [heads, page_len, columns] = [1, 2, 3].map(|dim| shape[dim]);
    let (batch, length) = (problem.batch, problem.kv_len);
    let target = empty(&pages, [batch, heads, length, columns], pages.dtype);
    let vector = match is_in_vectors(&pages, 4) {
        true => 4,
        false => 1,
    };
    let planes = batch * heads;
    if [planes, length, columns].contains(&0) {
        return target;
    }
    let row_vectors = columns / vector;
    let rows_of_cube = (UNITS * VECTORS_OF_UNIT / row_vectors).max(1);
    let cubes_of_head = problem
        .visible_keys(problem.q_len)
        .div_ceil(rows_of_cube)
        .min((MOST_CUBES / planes).max(1));
    let client = pages.client.clone();
    let structure = Structure::of_key_lengths(lengths.is_some());
    let element = dtype_to_storage_type(pages.dtype);
    // SAFETY: cubes whose index is not below `planes · cubes_of_head` stop at once. Every other cube reads existing
    // pages, because the kernel clamps page table entries. In `target`, the cube writes only rows of its own head, and
    // only rows below `length`.
    unsafe {
        gather_pages::launch_unchecked(
            &client,
            cube_count(&client, planes * cubes_of_head),
            CubeDim::new_1d(UNITS as u32),
            address_type([&pages, page_table, &target]),
            pages.into_tensor_arg(),
            page_table.clone().into_tensor_arg(),
            lengths.map(CubeTensor::into_tensor_arg).into(),
            target.clone().into_tensor_arg(),
            BoundsOffsets::of_lengths().seq_lens(problem),
            GatherSizesLaunch::new(
                heads as u32,
                planes,
                length as u32,
                columns as u32,
                row_vectors as u32,
                rows_of_cube as u32,
                cubes_of_head as u32,
            ),
            page_len,
            structure,
            element,
            vector,
        );
    }
    target
}

/// Writes new rows to their slots in the pages. If another handle shares the pages, the function copies the pages and
/// writes to the copy. Otherwise the function writes in place. See [`paged::append`](crate::paged::append).
pub(crate) fn appended(
    pages: CubeTensor,
    rows: CubeTensor,
    places: AppendPlaces<CubeBackend>,
) -> CubeTensor {
    let pages = own(pages);
    let shape = rows.meta.shape();
    let [batch, heads, new, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let of_pages = pages.meta.shape();
    let (count, page_len) = (of_pages[0], of_pages[2]);
    let of_sequence = places.page_table.meta.shape()[1];
    if [batch, heads, new, columns, count, page_len, of_sequence].contains(&0) {
        return pages;
    }
    let vector = match is_in_vectors(&rows, 4) && is_in_vectors(&pages, 4) {
        true => 4,
        false => 1,
    };
    let row_vectors = columns / vector;
    let vectors = batch * heads * new * row_vectors;
    let page_table = integers_as_read(places.page_table);
    let capacity = of_sequence * page_len;
    let starts = contiguous_integers(&places.starts, capacity);
    let counts = places.counts.as_option();
    let counts = counts.map(|counts| contiguous_integers(counts, new));
    let client = pages.client.clone();
    let element = dtype_to_storage_type(rows.dtype);
    // SAFETY: units whose index is not below `vectors` stop at once. Every other unit reads one vector of `rows`. The
    // unit writes only to existing pages, because the kernel skips a page table entry that is not the index of a page.
    unsafe {
        append_rows::launch_unchecked(
            &client,
            cube_count(&client, vectors.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            address_type([&pages, &rows]),
            rows.into_tensor_arg(),
            page_table.into_tensor_arg(),
            starts.into_tensor_arg(),
            counts.map(CubeTensor::into_tensor_arg).into(),
            pages.clone().into_tensor_arg(),
            AppendSizesLaunch::new(
                heads as u32,
                new as u32,
                columns as u32,
                row_vectors as u32,
                vectors,
            ),
            page_len,
            element,
            vector,
        );
    }
    pages
}

/// Returns a page table in i32 with contiguous rows. The entries are not clamped, so that the kernel recognizes invalid
/// entries.
fn integers_as_read(integers: CubeTensor) -> CubeTensor {
    match is_as_read(&integers) {
        true => integers,
        false => into_contiguous(CubeBackend::int_cast(integers, IntDType::I32)),
    }
}

/// Returns the pages in a buffer that no other handle shares. The rows are contiguous, but heads and keys may have any strides.
fn own(pages: CubeTensor) -> CubeTensor {
    let has_rows = pages.meta.strides()[3] == 1 && pages.is_nonoverlapping();
    match has_rows && pages.can_mut() {
        true => pages,
        false => {
            let pages = into_contiguous(pages);
            match pages.can_mut() {
                true => pages,
                // Make the copy contiguous, because Burn's copy may pad its rows.
                false => into_contiguous(pages.copy()),
            }
        }
    }
}

/// Returns scales `[pages, heads, page_len]` as rows of one column, `[pages, heads, page_len, 1]`.
pub(crate) fn as_rows(scales: CubeTensor) -> CubeTensor {
    let shape = scales.meta.shape();
    let shape = Shape::new([shape[0], shape[1], shape[2], 1]);
    burn_cubecl::ops::reshape(scales, shape)
}
