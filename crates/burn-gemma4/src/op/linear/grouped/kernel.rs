//! Products of groups of rows with the matrices of their experts, and their gradients, in f32.
//!
//! Budget: 8.5 KB of shared memory; 64 sums, and 16 numbers that they are made of, in registers. Bound by the units' multiplications: a
//! cube has a tile of 64 by 64, a unit 8 by 8 of it, which reads 16 numbers from shared memory for 64 products. A cube has the columns of a tile
//! for every so many-th tile of its expert's rows; what no expert needs is never read, and nothing depends on who comes first.

use crate::{
    op::dequantize::kernel::{RowParts, code, group_of_column, number, top_of_word},
    quantized::layout::Format,
};
use cubecl::prelude::*;

/// Rows and columns of a tile.
pub(super) const TILE: usize = 64;
/// What is summed over at once.
const DEPTH: usize = 16;
/// Rows, and columns, of a unit's part of a tile; also the units along each.
const PART: usize = 8;
/// Units of a cube.
pub(super) const UNITS: usize = PART * PART;
/// From one row of a tile in shared memory to the next: not a multiple of the banks.
const STRIDE: usize = TILE + 1;

/// Which of the products it is, of places' inputs `x` and of gradients `g` by their outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// `x · weightᵀ`: a row a place.
    Rows,
    /// `g · weight`: a row a place.
    Columns,
    /// `gᵀ · x`: a matrix an expert.
    Weight,
}

/// The sizes of a product.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    /// Columns of the outputs, and so rows of a matrix.
    pub columns_out: u32,
    /// Columns of the inputs, and so of a matrix.
    pub columns_in: u32,
    /// Places that read the same input.
    pub of_row: u32,
    /// Cubes that share the rows of an expert, or tiles that a matrix's rows are.
    pub of_rows: u32,
    /// Tiles of columns.
    pub of_columns: u32,
    /// All cubes.
    pub cubes: u32,
}

/// Its weight is `matrix`, or `words`; that of [`Form::Weight`] is what it writes, and `matrix` the inputs.
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
    // The rows of its tiles, and what is summed over.
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
            // Someone may still be reading the last ones.
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
                        comptime!(format.expect("the words have one")),
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

/// The rows of a tile, of inputs or gradients: those of places, or, of a matrix, columns of places.
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
        // Units beside each other read what lies together.
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

/// The columns of a tile: of an expert's matrix, or of places' inputs.
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

/// The same of a quantized matrix whose first row is `first_of_matrix`. A word's codes lie along the matrix's rows.
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
    // Words of a tile's row of the matrix.
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
        // Elsewhere the first row, which is there, and which nothing is made of.
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
