//! MoE GEMMs, forward and backward: each expert's rows times the expert's matrix, accumulated in f32. `order` lists the
//! (row, chosen expert) pairs, sorted by expert.
//!
//! Algorithm: a cube computes output tiles of 64 by 64. The cube loads 16 elements of the inner dimension at a time to
//! shared memory. Each unit computes 8 by 8 outputs of a tile. Per inner element a unit reads 16 values from shared
//! memory and executes 64 multiply-adds.
//!
//! All tiles of a cube cover the same 64 output columns. A row tile is 64 output rows of one expert. For each group of
//! 64 output columns, `of_rows` cubes divide an expert's row tiles among themselves.
//!
//! Budget: 8.3 KB of shared memory. Registers hold 64 accumulators and 16 values from shared memory per unit.
//!
//! Bound: the units' arithmetic. The matrices of unused experts are never read. Results are deterministic.

use crate::op::dequantize::kernel::{RowParts, code, group_of_column, number, top_of_word};
use crate::quant::layout::Format;
use cubecl::prelude::*;

/// The number of rows and of columns in a tile.
pub(super) const TILE: usize = 64;
/// The number of elements of the inner dimension that a tile in shared memory covers.
const DEPTH: usize = 16;
/// The number of rows and of columns that a unit owns in a tile. A tile has 8 units along each dimension.
const PART: usize = 8;
/// The number of units of a cube.
pub(super) const UNITS: usize = PART * PART;
/// The padded row stride of a `[DEPTH, TILE]` tile in shared memory. The padding avoids bank conflicts.
const STRIDE: usize = TILE + 1;

/// The kind of GEMM. `x` are the inputs of the (row, chosen expert) pairs, and `g` the gradients of the pairs' outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// The forward, `x · weightᵀ`. The output has one row for each (row, chosen expert) pair.
    Rows,
    /// The gradient with respect to the inputs, `g · weight`. The output has one row for each (row, chosen expert)
    /// pair.
    Columns,
    /// The gradient with respect to the weights, `gᵀ · x`. The output is one matrix per expert.
    Weight,
}

/// The sizes of a GEMM.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    /// The number of output columns of the forward, which is also the number of rows of an expert's matrix.
    pub columns_out: u32,
    /// The number of input columns of the forward, which is also the number of columns of an expert's matrix.
    pub columns_in: u32,
    /// The number of (row, chosen expert) pairs that read the same input row.
    pub of_row: u32,
    /// The number of cubes among which an expert's row tiles are divided. For [`Form::Weight`] each cube computes one
    /// row tile.
    pub of_rows: u32,
    /// The number of column tiles.
    pub of_columns: u32,
    /// The total number of cubes.
    pub cubes: u32,
}

/// Multiplies `left` by the experts' weights, which are `matrix` or the quantized `words`. For [`Form::Weight`] the
/// kernel computes the gradient of the weights. In this form `left` is the gradient of the forward's output, and
/// `matrix` is the forward's input.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn grouped<E: Float>(
    left: &Tensor<E>,
    matrix: ComptimeOption<&Tensor<E>>,
    words: ComptimeOption<&Tensor<u32>>,
    order: &Tensor<i32>,
    starts: &Tensor<i32>,
    output: &mut Tensor<E>,
    sizes: Sizes,
    parts: RowParts,
    #[comptime] form: Form,
    #[comptime] format: Option<Format>,
    #[comptime] converts_f16: bool,
    #[define(E)] _element: ElemType,
) {
    if CUBE_POS >= sizes.cubes as usize {
        terminate!();
    }
    let cube = CUBE_POS as u32;
    let of_rows = cube % sizes.of_rows;
    let first_column = cube / sizes.of_rows % sizes.of_columns * comptime!(TILE as u32);
    let expert = cube / sizes.of_rows / sizes.of_columns;
    let first_place = u32::cast_from(starts[expert as usize]);
    let end_place = u32::cast_from(starts[expert as usize + 1]);
    let first_row = of_rows * comptime!(TILE as u32);
    // The output rows are `row..end_row`, and the inner dimension is `first_inner..end_inner`. In the forms `Rows` and
    // `Columns` the output rows are the expert's (row, chosen expert) pairs. In the form `Weight` these pairs are the
    // inner dimension.
    let mut row = first_place + first_row;
    let mut end_row = end_place;
    let mut first_inner = 0u32;
    let mut end_inner = sizes.columns_in;
    let mut columns = sizes.columns_out;
    if comptime!(form == Form::Columns) {
        end_inner = sizes.columns_out;
        columns = sizes.columns_in;
    }
    if comptime!(form == Form::Weight) {
        row = first_row;
        end_row = min(first_row + comptime!(TILE as u32), sizes.columns_out);
        first_inner = first_place;
        end_inner = end_place;
        columns = sizes.columns_in;
    }

    let mut lefts = Shared::<[f32]>::new_slice(comptime!(DEPTH * STRIDE));
    let mut rights = Shared::<[f32]>::new_slice(comptime!(DEPTH * STRIDE));
    let unit_row = UNIT_POS as usize / PART;
    let unit_column = UNIT_POS as usize % PART;
    let mut sums = Array::<f32>::new(comptime!(PART * PART));
    let mut of_row = Array::<f32>::new(PART);
    let mut of_column = Array::<f32>::new(PART);
    while row < end_row {
        #[unroll]
        for index in 0..comptime!(PART * PART) {
            sums[index] = 0.0f32;
        }
        let mut at = first_inner;
        while at < end_inner {
            // Wait until all units have read the previous tiles, before the loads overwrite these tiles.
            sync_cube();
            load_left(
                left, order, &mut lefts, row, end_row, at, end_inner, sizes, form,
            );
            #[comptime]
            match matrix {
                ComptimeOption::Some(matrix) => {
                    load_right(
                        matrix,
                        order,
                        &mut rights,
                        first_column,
                        columns,
                        at,
                        end_inner,
                        expert,
                        sizes,
                        form,
                    );
                }
                ComptimeOption::None => {}
            }
            #[comptime]
            match words {
                ComptimeOption::Some(words) => {
                    load_words(
                        words,
                        &mut rights,
                        first_column,
                        columns,
                        at,
                        end_inner,
                        expert * sizes.columns_out,
                        &parts,
                        form,
                        comptime!(format.expect("quantized words have a format")),
                        converts_f16,
                    );
                }
                ComptimeOption::None => {}
            }
            sync_cube();
            for depth in 0..DEPTH {
                #[unroll]
                for index in 0..PART {
                    let own = depth * STRIDE + comptime!(index * PART);
                    of_row[index] = lefts[own + unit_row];
                    of_column[index] = rights[own + unit_column];
                }
                #[unroll]
                for r in 0..PART {
                    #[unroll]
                    for c in 0..PART {
                        sums[comptime!(r * PART + c)] += of_row[r] * of_column[c];
                    }
                }
            }
            at += comptime!(DEPTH as u32);
        }
        #[unroll]
        for r in 0..PART {
            let own = row + comptime!((r * PART) as u32) + unit_row as u32;
            if own < end_row {
                let mut to = expert * sizes.columns_out + own;
                if comptime!(form != Form::Weight) {
                    to = u32::cast_from(order[own as usize]);
                }
                #[unroll]
                for c in 0..PART {
                    let column = first_column + comptime!((c * PART) as u32) + unit_column as u32;
                    if column < columns {
                        output[to as usize * columns as usize + column as usize] =
                            E::cast_from(sums[comptime!(r * PART + c)]);
                    }
                }
            }
        }
        if comptime!(form == Form::Weight) {
            row = end_row;
        } else {
            row += sizes.of_rows * comptime!(TILE as u32);
        }
    }
}

/// Loads the left tile from the inputs or gradients. For [`Form::Weight`] the tile's rows are columns of the gradients.
#[cube]
fn load_left<E: Float>(
    left: &Tensor<E>,
    order: &Tensor<i32>,
    tile: &mut Shared<[f32]>,
    first: u32,
    end: u32,
    first_inner: u32,
    end_inner: u32,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    #[unroll]
    for step in 0..comptime!(TILE * DEPTH / UNITS) {
        // Assign adjacent elements to adjacent units, so that the loads are coalesced.
        let unit = UNIT_POS as usize;
        let mut depth = unit % DEPTH;
        let mut index = unit / DEPTH + comptime!(step * UNITS / DEPTH);
        if comptime!(form == Form::Weight) {
            depth = comptime!(step).runtime();
            index = unit;
        }
        let row = first + index as u32;
        let inner = first_inner + depth as u32;
        let mut value = 0.0f32;
        if row < end && inner < end_inner {
            if comptime!(form == Form::Rows) {
                let source = u32::cast_from(order[row as usize]) / sizes.of_row;
                let at = source as usize * sizes.columns_in as usize + inner as usize;
                value = f32::cast_from(left[at]);
            } else if comptime!(form == Form::Columns) {
                let place = u32::cast_from(order[row as usize]);
                let at = place as usize * sizes.columns_out as usize + inner as usize;
                value = f32::cast_from(left[at]);
            } else {
                let place = u32::cast_from(order[inner as usize]);
                let at = place as usize * sizes.columns_out as usize + row as usize;
                value = f32::cast_from(left[at]);
            }
        }
        tile[depth * STRIDE + index] = value;
    }
}

/// Loads the right tile from an expert's matrix, or from the inputs for [`Form::Weight`].
#[cube]
fn load_right<E: Float>(
    right: &Tensor<E>,
    order: &Tensor<i32>,
    tile: &mut Shared<[f32]>,
    first: u32,
    end: u32,
    first_inner: u32,
    end_inner: u32,
    expert: u32,
    sizes: Sizes,
    #[comptime] form: Form,
) {
    #[unroll]
    for step in 0..comptime!(TILE * DEPTH / UNITS) {
        let unit = UNIT_POS as usize;
        let mut depth = comptime!(step).runtime();
        let mut index = unit;
        if comptime!(form == Form::Rows) {
            depth = unit % DEPTH;
            index = unit / DEPTH + comptime!(step * UNITS / DEPTH);
        }
        let column = first + index as u32;
        let inner = first_inner + depth as u32;
        let mut value = 0.0f32;
        if column < end && inner < end_inner {
            if comptime!(form == Form::Rows) {
                let row = (expert * sizes.columns_out + column) as usize;
                value = f32::cast_from(right[row * sizes.columns_in as usize + inner as usize]);
            } else if comptime!(form == Form::Columns) {
                let row = (expert * sizes.columns_out + inner) as usize;
                value = f32::cast_from(right[row * sizes.columns_in as usize + column as usize]);
            } else {
                let source = u32::cast_from(order[inner as usize]) / sizes.of_row;
                let at = source as usize * sizes.columns_in as usize + column as usize;
                value = f32::cast_from(right[at]);
            }
        }
        tile[depth * STRIDE + index] = value;
    }
}

/// Loads the right tile from an expert's quantized matrix, which begins at row `first_of_matrix` of `words`. Each word
/// holds codes of adjacent columns.
#[cube]
fn load_words(
    words: &Tensor<u32>,
    tile: &mut Shared<[f32]>,
    first: u32,
    end: u32,
    first_inner: u32,
    end_inner: u32,
    first_of_matrix: u32,
    parts: &RowParts,
    #[comptime] form: Form,
    #[comptime] format: Format,
    #[comptime] converts_f16: bool,
) {
    let codes = comptime!(format.codes_of_word());
    // The number of packed words that the tile covers in one row of the matrix.
    let words_of_row = comptime!((if form == Form::Rows { DEPTH } else { TILE }) / codes);
    #[unroll]
    for step in 0..comptime!(TILE * DEPTH / codes / UNITS) {
        let item = UNIT_POS as usize + comptime!(step * UNITS);
        let in_row = item % words_of_row * codes;
        let of_row = item / words_of_row;
        let mut row = first + of_row as u32;
        let mut column = first_inner + in_row as u32;
        let mut is_there = row < end && column < end_inner;
        if comptime!(form == Form::Columns) {
            row = first_inner + of_row as u32;
            column = first + in_row as u32;
            is_there = row < end_inner && column < end;
        }
        // For elements outside the expert's matrix, load the first word of `words`, so that the load stays in bounds.
        // Zeros replace the loaded values.
        let row = select(is_there, first_of_matrix + row, 0u32);
        let column = select(is_there, column, 0u32);
        let start = row as usize * parts.stride as usize;
        let word = column / comptime!(codes as u32);
        let own = words[start + word as usize];
        let top = top_of_word(words, start + parts.top as usize, word, format);
        let scales = start + parts.scales as usize;
        let group = group_of_column(words, scales, column, format, converts_f16);
        #[unroll]
        for index in 0..codes {
            let value = number(code(own, top, index, format), &group, format);
            let value = select(is_there, value, 0.0f32);
            if comptime!(form == Form::Rows) {
                tile[(in_row + index) * STRIDE + of_row] = value;
            } else {
                tile[of_row * STRIDE + in_row + index] = value;
            }
        }
    }
}
