//! Functions that load and store four columns of a row in global memory.

use super::code_rows::{codes, is_packed, word_at};
use super::vec4::{Four, Vec4, zeros};
use crate::math::layout::Rows;
use crate::math::rounding::rounded;
use cubecl::prelude::*;

/// Loads the columns `column` to `column + 3` of the row at `offset`, as f32. Columns past the row's end are zero.
#[cube]
pub(crate) fn load_vec4<E: Numeric, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    offset: usize,
    column: u32,
) -> Vec4 {
    load_four::<E, f32, N>(source, rows, offset, column)
}

/// Loads the columns `column` to `column + 3` of the row at `offset`. If the row consists of packed words, the function
/// returns the four codes as floats. Columns past the row's end are zero.
///
/// For columns past the end, the function loads the row's first columns and then selects zeros. With a branch instead,
/// compilers would finish each load before the next load begins.
#[cube]
pub(super) fn load_four<E: Numeric, C: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    offset: usize,
    column: u32,
) -> Four<C> {
    let vector_size = source.vector_size();
    let words = is_packed::<E>();
    let mut values = zeros::<C>();
    let is_there = column < rows.columns;
    let first = select(is_there, column, 0u32);
    if comptime!(words) {
        values = codes::<E, C>(word_at(source, offset, first));
    } else if comptime!(vector_size == 4) {
        let loaded = source[(offset + first as usize) / 4];
        #[unroll]
        for lane in 0..4usize {
            values.insert(lane, C::cast_from(loaded.extract(lane)));
        }
    } else {
        #[unroll]
        for lane in 0..4usize {
            let column = column + lane as u32;
            let is_there = column < rows.columns;
            let index = offset + select(is_there, column, 0u32) as usize * rows.column_stride;
            let value = C::cast_from(source[index].extract(0usize));
            values.insert(lane, select(is_there, value, C::from_int(0)));
        }
    }
    if !is_there {
        values = zeros::<C>();
    }
    values
}

/// Writes `factor · values` to the columns `column` to `column + 3` of the row at `offset`. Columns past the row's end
/// are not written.
#[cube]
pub(super) fn store_scaled<E: Float, N: Size>(
    values: Vec4,
    factor: f32,
    target: &mut Tensor<Vector<E, N>>,
    rows: &Rows,
    offset: usize,
    column: usize,
) {
    let vector_size = target.vector_size();
    if comptime!(vector_size == 4) {
        if (column as u32) < rows.columns {
            let mut stored = Vector::<E, N>::empty();
            #[unroll]
            for lane in 0..4usize {
                stored.insert(lane, rounded::<E>(scaled(values.extract(lane), factor)));
            }
            target[(offset + column) / 4] = stored;
        }
    } else {
        #[unroll]
        for lane in 0..4usize {
            if ((column + lane) as u32) < rows.columns {
                target[offset + column + lane] =
                    Vector::cast_from(rounded::<E>(scaled(values.extract(lane), factor)));
            }
        }
    }
}

#[cube]
fn scaled(value: f32, factor: f32) -> f32 {
    select(factor == 0.0f32, 0.0f32, value * factor)
}
