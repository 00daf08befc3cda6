//! Copies keys and values from pages to contiguous tensors, and appends new rows to the pages. Tests compare the kernels
//! with this module, and devices without kernels run it.

use crate::integers::{INTS, at_least_i32, clamped_integers};
use crate::problem::AttentionProblem;
use crate::types::tensors::{
    AppendPlaces, AttentionInputs, MaybeInt, QuantizedInputs, QuantizedTensors,
};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{IndexingUpdateOp, Shape, Slice};

/// Defines the operations on pages for tensors of one kind (floats or integers).
macro_rules! of_kind {
    (
        $tensor:ident,
        $gather:ident,
        $append:ident,
        [$select:ident, $assign:ident, $reshape:ident, $permute:ident, $cat:ident, $slice:ident, $zeros:ident]
    ) => {
        /// Returns the rows of each sequence in order, `[batch, heads, pages of a sequence · page_len, columns]`. Entries of
        /// the page table are clamped to `0..pages`.
        pub(crate) fn $gather<B: Backend>(
            pages: $tensor<B>,
            page_table: &IntTensor<B>,
        ) -> $tensor<B> {
            let shape = pages.shape();
            let [count, heads, page_len, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
            let [batch, of_sequence] = [0, 1].map(|dim| page_table.shape()[dim]);
            let rows = Shape::new([batch, heads, of_sequence * page_len, columns]);
            if rows.num_elements() == 0 {
                return B::$zeros(rows, &pages.device(), pages.dtype().into());
            }
            let entries = clamped_integers::<B>(page_table.clone(), count - 1);
            let entries = B::int_reshape(entries, Shape::new([batch * of_sequence]));
            let found = B::$reshape(
                B::$select(pages, 0, entries),
                Shape::new([batch, of_sequence, heads, page_len, columns]),
            );
            B::$reshape(B::$permute(found, &[0, 2, 1, 3, 4]), rows)
        }

        /// Writes new rows to the pages, and returns the pages. See [`paged::append`](crate::paged::append).
        pub(crate) fn $append<B: Backend>(
            pages: $tensor<B>,
            rows: $tensor<B>,
            places: AppendPlaces<B>,
        ) -> $tensor<B> {
            let shape = pages.shape();
            let [count, heads, page_len, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
            let [batch, new] = [rows.shape()[0], rows.shape()[2]];
            let of_sequence = places.page_table.shape()[1];
            if rows.shape().num_elements() == 0 || [count, page_len, of_sequence].contains(&0) {
                return pages;
            }
            let all = count * heads * page_len;
            let targets = targets::<B>(places, [count, heads, page_len], [batch, new]);
            // A new row may have no slot (the place of one token) in the pages. Such rows are written to one additional
            // row after the last page's rows. The additional row is removed afterwards.
            let rows = B::$reshape(rows, Shape::new([batch * heads * new, columns]));
            let pages = B::$reshape(pages, Shape::new([all, columns]));
            let nowhere = B::$slice(rows.clone(), &[Slice::from(0..1), Slice::from(0..columns)]);
            let pages = B::$cat(vec![pages, nowhere], 0);
            let pages = B::$assign(pages, 0, targets, rows, IndexingUpdateOp::Assign);
            let pages = B::$slice(pages, &[Slice::from(0..all), Slice::from(0..columns)]);
            B::$reshape(pages, shape)
        }
    };
}

of_kind!(
    FloatTensor,
    gathered_floats,
    append_floats,
    [
        float_select,
        float_select_assign,
        float_reshape,
        float_permute,
        float_cat,
        float_slice,
        float_zeros
    ]
);
of_kind!(
    IntTensor,
    gathered_integers,
    append_integers,
    [
        int_select,
        int_select_assign,
        int_reshape,
        int_permute,
        int_cat,
        int_slice,
        int_zeros
    ]
);

/// Returns the target of each new row, `[batch · heads · new]`. The target is the index, among the rows of all pages,
/// of the row that the new row overwrites. If a new row must not be written, its target is the index after the last row.
fn targets<B: Backend>(
    places: AppendPlaces<B>,
    [count, heads, page_len]: [usize; 3],
    [batch, new]: [usize; 2],
) -> IntTensor<B> {
    let device = places.page_table.device();
    let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
    let of_sequence = places.page_table.shape()[1];
    let capacity = of_sequence * page_len;
    let all = Shape::new([batch, new]);
    let of_batch = |integers, most| {
        let integers = B::int_reshape(
            clamped_integers::<B>(integers, most),
            Shape::new([batch, 1]),
        );
        B::int_expand(integers, all.clone())
    };
    let index = B::int_arange(0..new as i64, &device, INTS);
    let index = B::int_expand(B::int_reshape(index, Shape::new([1, new])), all.clone());
    let positions = B::int_add(index.clone(), of_batch(places.starts, capacity));
    let end = (capacity as i64).into();
    let mut dropped = B::int_greater_equal_elem(positions.clone(), end, bools);
    if let Some(counts) = places.counts.into_option() {
        let counts = of_batch(counts, new);
        dropped = B::bool_or(dropped, B::int_greater_equal(index, counts, bools));
    }
    let last = (capacity as i64 - 1).into();
    let positions = B::int_clamp(positions, 0.into(), last);
    let number = B::int_div_scalar(positions.clone(), (page_len as i64).into());
    let slot = B::int_remainder_scalar(positions, (page_len as i64).into());
    let table = at_least_i32::<B>(places.page_table);
    let is_page = B::bool_and(
        B::int_greater_equal_elem(table.clone(), 0.into(), bools),
        B::int_lower_elem(table.clone(), (count as i64).into(), bools),
    );
    let is_page = B::int_gather(1, B::bool_into_int(is_page, INTS), number.clone());
    dropped = B::bool_or(dropped, B::int_equal_elem(is_page, 0.into(), bools));
    let page = B::int_gather(1, clamped_integers::<B>(table, count - 1), number);
    // A page stores all rows of its first head, then all rows of its second head, and so on.
    let first = B::int_mul_scalar(page, ((heads * page_len) as i64).into());
    let row = B::int_reshape(B::int_add(first, slot), Shape::new([batch, 1, new]));
    let head = B::int_arange(0..heads as i64, &device, INTS);
    let head = B::int_mul_scalar(head, (page_len as i64).into());
    let every = Shape::new([batch, heads, new]);
    let head = B::int_expand(
        B::int_reshape(head, Shape::new([1, heads, 1])),
        every.clone(),
    );
    let targets = B::int_add(B::int_expand(row, every.clone()), head);
    let dropped = B::bool_reshape(dropped, Shape::new([batch, 1, new]));
    let nowhere = ((count * heads * page_len) as i64).into();
    let targets = B::int_mask_fill(targets, B::bool_expand(dropped, every), nowhere);
    B::int_reshape(targets, Shape::new([batch * heads * new]))
}

/// Copies keys and values from pages to contiguous tensors, and returns the problem over the copies.
pub(crate) fn contiguous<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> (AttentionInputs<B>, AttentionProblem) {
    let inputs = match inputs.page_table.as_option().cloned() {
        None => inputs,
        Some(page_table) => AttentionInputs {
            key: gathered_floats::<B>(inputs.key, &page_table),
            value: gathered_floats::<B>(inputs.value, &page_table),
            page_table: MaybeInt::Absent,
            ..inputs
        },
    };
    (inputs, problem.over_contiguous_keys())
}

/// Copies quantized keys and values from pages to contiguous tensors, and returns the problem over the copies.
pub(crate) fn contiguous_quantized<B: Backend>(
    inputs: QuantizedInputs<B>,
    problem: &AttentionProblem,
) -> (QuantizedInputs<B>, AttentionProblem) {
    let inputs = match inputs.page_table.as_option().cloned() {
        None => inputs,
        Some(page_table) => QuantizedInputs {
            key: gathered_rows::<B>(inputs.key, &page_table),
            value: gathered_rows::<B>(inputs.value, &page_table),
            page_table: MaybeInt::Absent,
            ..inputs
        },
    };
    (inputs, problem.over_contiguous_keys())
}

fn gathered_rows<B: Backend>(
    rows: QuantizedTensors<B>,
    page_table: &IntTensor<B>,
) -> QuantizedTensors<B> {
    let shape = rows.scales.shape();
    let [pages, heads, page_len] = [0, 1, 2].map(|dim| shape[dim]);
    let scales = B::float_reshape(rows.scales, Shape::new([pages, heads, page_len, 1]));
    let scales = gathered_floats::<B>(scales, page_table);
    let shape = scales.shape();
    let of_rows = Shape::new([shape[0], shape[1], shape[2]]);
    QuantizedTensors {
        words: gathered_integers::<B>(rows.words, page_table),
        scales: B::float_reshape(scales, of_rows),
    }
}
