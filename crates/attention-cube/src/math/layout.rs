//! Where the rows of a head lie in a tensor `[batch, heads, length, columns]`, whatever its strides.

use cubecl::prelude::*;

/// The rows of a head, or of a group of heads one after the other, and which of them may be read.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Rows {
    /// Element offset of the first row.
    pub base: usize,
    /// Elements from a row to the next, and from a column to the next.
    pub row_stride: usize,
    pub column_stride: usize,
    /// Rows before `first` and from `end` on are zero instead of read.
    pub first: i32,
    pub end: i32,
    /// Columns a row has.
    pub columns: u32,
    /// Read only where the heads of a group are packed: the rows of one head, and elements from a head
    /// to the next.
    pub head_length: u32,
    pub head_stride: usize,
}

/// An operand of a product, and which of its rows are meant. Of words of int8, rows and strides are in words, and the columns those of the numbers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Operand<'a, E: Numeric, N: Size> {
    pub tensor: &'a Tensor<Vector<E, N>>,
    pub rows: Rows,
}

/// These rows of a tensor.
#[cube]
pub(crate) fn operand<'a, E: Numeric, N: Size>(
    tensor: &'a Tensor<Vector<E, N>>,
    rows: Rows,
) -> Operand<'a, E, N> {
    Operand::<'a, E, N> { tensor, rows }
}

/// The rows of one head of an operand; `first..end` may be read.
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

/// The rows of one head; `first..end` may be read.
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

/// The rows of the heads from `head` on, `head_length` of each; `first..end` may be read.
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
        columns,
        head_length,
        head_stride,
    }
}

/// The element offset of `row`, counted through the heads of a group where they are `packed`.
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
