//! The element offsets of a head's rows. The rows belong to a tensor `[batch, heads, length, columns]`, which may have
//! any strides.

use cubecl::prelude::*;

/// The rows of one head, or the rows of all query heads of a GQA group, one head after another. Kernels may read only
/// the rows `first..end`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Rows {
    /// The element offset of the first row.
    pub base: usize,
    /// The strides between neighboring rows (`row_stride`) and between neighboring columns (`column_stride`), in elements.
    pub row_stride: usize,
    pub column_stride: usize,
    /// The range of rows that may be read, `first..end`. Loads of rows outside of this range return zeros.
    pub first: i32,
    pub end: i32,
    /// The index of a row that exists. If a load must not read its own row, the load reads this existing row instead
    /// and discards the elements.
    pub fallback: u32,
    /// The number of columns per row.
    pub columns: u32,
    /// The number of rows per head, and the stride between heads in elements. Kernels read these fields only if a tile packs
    /// the rows of several heads.
    pub head_length: u32,
    pub head_stride: usize,
}

/// One input of a tile multiplication: a tensor, and the rows that a kernel reads. If the tensor holds quantized codes,
/// the rows' offset and strides count 32-bit words of four codes. `columns` then counts codes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Operand<'a, E: Numeric, N: Size> {
    pub tensor: &'a Tensor<Vector<E, N>>,
    pub rows: Rows,
}

/// Builds an operand from a tensor and its rows.
#[cube]
pub(crate) fn operand<'a, E: Numeric, N: Size>(
    tensor: &'a Tensor<Vector<E, N>>,
    rows: Rows,
) -> Operand<'a, E, N> {
    Operand::<'a, E, N> { tensor, rows }
}

/// Builds the operand for one head. Kernels may read only the head's rows `first..end`.
#[cube]
pub(crate) fn head_operand<'a, E: Numeric, N: Size>(
    tensor: &'a Tensor<Vector<E, N>>,
    batch: u32,
    head: u32,
    first: i32,
    end: i32,
    columns: u32,
) -> Operand<'a, E, N> {
    operand(tensor, head_rows(tensor, batch, head, first, end, columns))
}

/// Returns the rows of one head. Kernels may read only the head's rows `first..end`.
#[cube]
pub(crate) fn head_rows<E: Numeric, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    batch: u32,
    head: u32,
    first: i32,
    end: i32,
    columns: u32,
) -> Rows {
    group_rows(tensor, batch, head, 0u32, first, end, columns)
}

/// Returns the rows of a group of heads. `head` is the index of the group's first head. Kernels may read only the rows
/// `first..end`.
#[cube]
pub(crate) fn group_rows<E: Numeric, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    batch: u32,
    head: u32,
    head_length: u32,
    first: i32,
    end: i32,
    columns: u32,
) -> Rows {
    let head_stride = tensor.stride(1);
    Rows {
        base: batch as usize * tensor.stride(0) + head as usize * head_stride,
        row_stride: tensor.stride(2),
        column_stride: tensor.stride(3),
        first,
        end,
        fallback: u32::new(0),
        columns,
        head_length,
        head_stride,
    }
}

/// The page that holds a block of keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Page {
    /// The page's index in the tensors of keys and values.
    pub index: u32,
    /// The page's first key, as an index into the sequence's keys.
    pub first_key: i32,
}

/// Returns the page that holds key `key` of sequence `batch`. Without a page table, the whole sequence counts as one page.
#[cube]
pub(crate) fn page_of<E: Numeric, N: Size>(
    page_table: &ComptimeOption<OwnedTensor<i32>>,
    pages: &Tensor<Vector<E, N>>,
    batch: u32,
    key: i32,
    #[comptime] page_len: usize,
) -> Page {
    #[comptime]
    match page_table {
        ComptimeOption::Some(page_table) => {
            let number = key / comptime!(page_len as i32);
            Page {
                index: page_in(page_table, pages, batch, number as u32),
                first_key: number * comptime!(page_len as i32),
            }
        }
        ComptimeOption::None => Page {
            index: batch,
            first_key: i32::new(0),
        },
    }
}

/// Returns entry `number` of sequence `batch` in the page table. The entry is the index of a page in the tensor
/// `pages`.
///
/// The function clamps `number` to the entries of the table, so that the read stays in the table. The function clamps
/// the entry to `0..pages.shape(0)`, so that later reads stay in `pages`.
#[cube]
pub(crate) fn page_in<E: Numeric, N: Size>(
    page_table: &Tensor<i32>,
    pages: &Tensor<Vector<E, N>>,
    batch: u32,
    number: u32,
) -> u32 {
    let column = min(number, page_table.shape(1) as u32 - 1u32);
    let entry = page_table[batch as usize * page_table.stride(0) + column as usize];
    min(max(entry, 0i32) as u32, pages.shape(0) as u32 - 1u32)
}

/// Moves an operand from the rows of page 0 to the rows of `page`. Kernels still address a row by its index within the
/// sequence, but may read only the rows that lie in the page.
#[cube]
pub(crate) fn in_page<'a, E: Numeric, N: Size>(
    operand: Operand<'a, E, N>,
    page: &Page,
    #[comptime] page_len: usize,
) -> Operand<'a, E, N> {
    if comptime!(page_len > 0) {
        let mut rows = operand.rows;
        // The subtraction may wrap `rows.base` around below 0. Kernels later add to `rows.base` the offset of a row in
        // the page. This offset is at least the subtracted number, so the sum wraps around again and is correct.
        rows.base += page.index as usize * operand.tensor.stride(0)
            - page.first_key as usize * rows.row_stride;
        // Limit the rows and the fallback row to the page, because no load may leave the page, not even a load whose result
        // is ignored.
        rows.end = min(rows.end, page.first_key + comptime!(page_len as i32));
        rows.fallback = page.first_key as u32;
        Operand::<'a, E, N> {
            tensor: operand.tensor,
            rows,
        }
    } else {
        operand
    }
}

/// Returns the element offset of `row`. If `packed` is true, rows are numbered over all heads of the GQA group, one
/// head after another.
#[cube]
pub(crate) fn row_offset(rows: &Rows, row: u32, #[comptime] packed: bool) -> usize {
    if comptime!(packed) {
        let head = row / rows.head_length;
        let within = row % rows.head_length;
        rows.base + head as usize * rows.head_stride + within as usize * rows.row_stride
    } else {
        rows.base + row as usize * rows.row_stride
    }
}
