//! The tile products of the unit engine: any CubeCL device, no plane operations, f32 throughout.
//!
//! Budget. A cube of `units` units works on a tile of `rows` stationary rows (queries in the forward,
//! keys in the key gradient) and streams `columns` rows of the other side past it. Two products, both
//! out of shared memory in vectors of 4:
//!
//! | product | a unit holds | shared loads a unit (×16 B) | FMA |
//! |---|---|---|---|
//! | [`multiply_transposed`]: `S = A Bᵀ`, depth in chunks | `rows_per_unit × 4` of S | `rows_per_unit + 4` a 4-column step | `16 · rows_per_unit` |
//! | [`accumulate`]: `O += P B`, streamed rows in chunks | `output_rows × 4 output_vectors` of O | `output_rows + 4 output_vectors` for 4 keys | `16 · output_rows · output_vectors` |
//!
//! On software drivers `direct.rs` does both products without shared memory for the operands.
//!
//! What bounds it: shared-memory loads in the first product (0.3 loads an FMA at 2 rows a unit, 0.13 at 4),
//! FMA in the second. Shared memory is `stage + P + row statistics`: [`UnitTiles::shared_memory`]. The
//! operands are read again for every block of the other side, from L2: `rows` FMA an element.

use super::direct;
use crate::math::layout::{Operand, Rows, row_offset};
use crate::math::rounding::rounded;
use crate::tile::tiles::UnitTiles;
use cubecl::prelude::*;

/// Columns that a dot product sums by themselves, and then their sums. One chain over 512 columns would lose two more bits, which
/// shows where the backward subtracts Δ from dP. Every staged tile sums alike, whatever its depth: the backward's scores are then
/// the forward's bit by bit, which shows where scores are so large that their last bit changes a probability.
const SUM: usize = 16;

/// Four f32, the unit of every shared-memory access.
pub(crate) type Vec4 = Vector<f32, Const<4>>;

/// Four columns of a row from `column` on, in f32; zero where there are none.
#[cube]
pub(crate) fn load_vec4<E: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    offset: usize,
    column: u32,
) -> Vec4 {
    let vector_size = source.vector_size();
    let mut values = Vec4::new(0.0);
    if comptime!(vector_size == 4) {
        if column < rows.columns {
            let loaded = source[(offset + column as usize) / 4];
            #[unroll]
            for lane in 0..4usize {
                values.insert(lane, f32::cast_from(loaded.extract(lane)));
            }
        }
    } else {
        #[unroll]
        for lane in 0..4usize {
            if column + (lane as u32) < rows.columns {
                let index = offset + (column as usize + lane) * rows.column_stride;
                values.insert(lane, f32::cast_from(source[index].extract(0usize)));
            }
        }
    }
    values
}

/// Copies `count` rows from `first_row` on, `vectors` vectors of each from `first_column` on, into
/// `stage[at..]`, `pitch` vectors apart. With `interleaved > 0`, slot `s` holds row
/// `(s % interleaved) · 4 + s / interleaved`: a unit's four columns of S then lie `interleaved` slots
/// apart, and neighbouring units read neighbouring slots.
#[cube]
pub(crate) fn stage_rows<E: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    first_row: i32,
    first_column: u32,
    stage: &mut Shared<[Vec4]>,
    #[comptime] at: usize,
    #[comptime] count: usize,
    #[comptime] vectors: usize,
    #[comptime] pitch: usize,
    #[comptime] interleaved: usize,
    #[comptime] packed: bool,
    #[comptime] units: usize,
) {
    let total = comptime!(count * vectors);
    #[unroll]
    for step in 0..comptime!(total.div_ceil(units)) {
        let index = UNIT_POS as usize + step * units;
        let whole = comptime!((step + 1) * units <= total);
        if whole || index < total {
            let slot = index / vectors;
            let vector = index % vectors;
            let mut within = slot;
            if comptime!(interleaved > 0) {
                within = (slot % interleaved) * 4 + slot / interleaved;
            }
            let row = first_row + within as i32;
            let mut values = Vec4::new(0.0);
            if row >= rows.first && row < rows.end {
                let offset = row_offset(rows, row as u32, packed);
                values = load_vec4(source, rows, offset, first_column + (vector * 4) as u32);
            }
            stage[at + slot * pitch + vector] = values;
        }
    }
}

/// `S = A Bᵀ` for the tile's rows of `a` and a block's rows of `b`: S of unit `(y, x)` at
/// `[k · columns_per_unit + c]` is the row `y + k · row_units`, the column `tile_column(x, c)`.
///
/// Where there is no such row, S is anything.
#[cube]
pub(crate) fn multiply_transposed<E: Float, N: Size>(
    a: &Operand<'_, E, N>,
    a_first: i32,
    b: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut Shared<[Vec4]>,
    s: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
    #[comptime] a_packed: bool,
) {
    if comptime!(tiles.direct) {
        direct::multiply_transposed(a, a_first, b, b_first, s, tiles, a_packed);
    } else {
        multiply_staged(a, a_first, b, b_first, stage, s, tiles, a_packed);
    }
}

/// [`multiply_transposed`] out of shared memory. Ends with the stage still being read.
#[cube]
fn multiply_staged<E: Float, N: Size>(
    a: &Operand<'_, E, N>,
    a_first: i32,
    b: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut Shared<[Vec4]>,
    s: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
    #[comptime] a_packed: bool,
) {
    comptime!(assert!(tiles.depth.is_multiple_of(SUM), "{tiles:?}"));
    let pitch = comptime!(tiles.depth_pitch());
    let b_at = comptime!(tiles.rows * tiles.depth_pitch());
    let vectors = comptime!(tiles.depth / 4);
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);
    #[unroll]
    for index in 0..comptime!(4 * tiles.rows_per_unit()) {
        s[index] = 0.0f32;
    }
    let chunks = a.rows.columns.div_ceil(comptime!(tiles.depth as u32));
    for chunk in 0..chunks {
        let column = chunk * comptime!(tiles.depth as u32);
        sync_cube();
        stage_rows(
            a.tensor,
            &a.rows,
            a_first,
            column,
            stage,
            0usize,
            tiles.rows,
            vectors,
            pitch,
            0usize,
            a_packed,
            tiles.units,
        );
        stage_rows(
            b.tensor,
            &b.rows,
            b_first,
            column,
            stage,
            b_at,
            comptime!(tiles.columns()),
            vectors,
            pitch,
            tiles.column_units,
            false,
            tiles.units,
        );
        sync_cube();
        #[unroll]
        for group in 0..comptime!(tiles.depth / SUM) {
            let mut part = Array::<f32>::new(comptime!(4 * tiles.rows_per_unit()));
            #[unroll]
            for index in 0..comptime!(4 * tiles.rows_per_unit()) {
                part[index] = 0.0f32;
            }
            for step in 0..comptime!(SUM / 4) {
                let vector = comptime!(group * SUM / 4) + step;
                let mut b_values = Array::<Vec4>::new(4usize);
                #[unroll]
                for c in 0..4usize {
                    b_values[c] = stage
                        [b_at + (unit_column + c * comptime!(tiles.column_units)) * pitch + vector];
                }
                #[unroll]
                for k in 0..comptime!(tiles.rows_per_unit()) {
                    let a_value =
                        stage[(unit_row + k * comptime!(tiles.row_units())) * pitch + vector];
                    #[unroll]
                    for c in 0..4usize {
                        let b_value = b_values[c];
                        let mut sum = part[k * 4 + c];
                        #[unroll]
                        for lane in 0..4usize {
                            sum += a_value.extract(lane) * b_value.extract(lane);
                        }
                        part[k * 4 + c] = sum;
                    }
                }
            }
            #[unroll]
            for index in 0..comptime!(4 * tiles.rows_per_unit()) {
                s[index] += part[index];
            }
        }
    }
}

/// The column of the tile where the `c`-th of a unit's columns lies.
#[cube]
pub(crate) fn tile_column(
    unit_column: usize,
    #[comptime] c: usize,
    #[comptime] tiles: UnitTiles,
) -> usize {
    (unit_column + comptime!(c / 4 * tiles.column_units)) * 4 + comptime!(c % 4)
}

/// The row of the tile where the `k`-th of a unit's rows lies. Where the tile is copied from shared memory,
/// neighbouring units read neighbouring rows; elsewhere rows lie by fours, as columns do.
#[cube]
pub(crate) fn tile_row(
    unit_row: usize,
    #[comptime] k: usize,
    #[comptime] tiles: UnitTiles,
) -> usize {
    if comptime!(tiles.direct) {
        (unit_row + comptime!(k / 4 * tiles.row_units())) * 4 + comptime!(k % 4)
    } else {
        unit_row + k * comptime!(tiles.row_units())
    }
}

/// Writes a unit's part of a tile of S's shape to shared memory.
#[cube]
pub(crate) fn store_tile(s: &Array<f32>, tile: &mut Shared<[Vec4]>, #[comptime] tiles: UnitTiles) {
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let row = tile_row(unit_row, k, tiles);
        #[unroll]
        for quad in 0..tiles.column_vectors {
            let mut values = Vec4::new(0.0);
            #[unroll]
            for c in 0..4usize {
                values.insert(c, s[comptime!(k * tiles.columns_per_unit() + 4 * quad + c)]);
            }
            let column = unit_column + comptime!(quad * tiles.column_units);
            tile[row * comptime!(tiles.tile_pitch()) + column] = values;
        }
    }
}

/// Marks the columns of the tile that hold anything but zeros. Between two syncs.
#[cube]
fn mark_used(tile: &Shared<[Vec4]>, used: &mut Shared<[u32]>, #[comptime] tiles: UnitTiles) {
    sync_cube();
    #[unroll]
    for step in 0..comptime!(tiles.columns().div_ceil(tiles.units)) {
        let column = UNIT_POS as usize + step * tiles.units;
        if column < comptime!(tiles.columns()) {
            let mut any = 0u32;
            for row in 0..tiles.rows {
                let values = tile[row * comptime!(tiles.tile_pitch()) + column / 4];
                #[unroll]
                for lane in 0..4usize {
                    if lane == column % 4 && values.extract(lane) != 0.0f32 {
                        any = 1u32;
                    }
                }
            }
            used[column] = any;
        }
    }
    sync_cube();
}

/// `O += P B` for the tile P in shared memory and the block's rows of `b`. O of a unit at
/// `[k · output_vectors + v]` is the row `unit_row + k · output_row_units`, the vector of columns
/// `unit_column + v · output_units`. Starts before the tile is visible to all units.
///
/// Where the tile `has_masked`, rows of `b` that meet nothing but zeros do not count: they may hold NaN.
#[cube]
pub(crate) fn accumulate<E: Float, N: Size>(
    tile: &Shared<[Vec4]>,
    b: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut Shared<[Vec4]>,
    used: &mut Shared<[u32]>,
    output: &mut Array<Vec4>,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    if comptime!(has_masked) {
        mark_used(tile, used, tiles);
    }
    if comptime!(tiles.direct) {
        if comptime!(!has_masked) {
            sync_cube();
        }
        direct::accumulate(tile, b, b_first, used, output, has_masked, tiles);
    } else {
        accumulate_staged(tile, b, b_first, stage, used, output, has_masked, tiles);
    }
}

/// [`accumulate`] out of shared memory. Ends with the stage still being read.
#[cube]
fn accumulate_staged<E: Float, N: Size>(
    tile: &Shared<[Vec4]>,
    b: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut Shared<[Vec4]>,
    used: &mut Shared<[u32]>,
    output: &mut Array<Vec4>,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    let unit_row = UNIT_POS as usize / comptime!(tiles.output_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.output_units);
    let width = comptime!(tiles.staged_width());
    let total = comptime!(tiles.streamed_rows * tiles.staged_width());
    for chunk in 0..comptime!(tiles.columns() / tiles.streamed_rows) {
        let chunk_row = chunk * tiles.streamed_rows;
        #[unroll]
        for part in 0..comptime!(tiles.output_vectors / tiles.staged_vectors) {
            let first_vector = comptime!(part * tiles.staged_width());
            sync_cube();
            #[unroll]
            for step in 0..comptime!(total.div_ceil(tiles.units)) {
                let index = UNIT_POS as usize + step * tiles.units;
                let whole = comptime!((step + 1) * tiles.units <= total);
                if whole || index < total {
                    let slot = index / width;
                    let vector = first_vector + index % width;
                    let row = b_first + (chunk_row + slot) as i32;
                    let mut values = Vec4::new(0.0);
                    let mut wanted = row >= b.rows.first && row < b.rows.end;
                    if comptime!(has_masked) {
                        wanted = wanted && used[chunk_row + slot] != 0u32;
                    }
                    if wanted {
                        let offset = row_offset(&b.rows, row as u32, false);
                        values = load_vec4(b.tensor, &b.rows, offset, (vector * 4) as u32);
                    }
                    stage[index] = values;
                }
            }
            sync_cube();
            for quad in 0..comptime!(tiles.streamed_rows / 4) {
                let mut p = Array::<Vec4>::new(comptime!(tiles.output_rows()));
                #[unroll]
                for k in 0..comptime!(tiles.output_rows()) {
                    let row = unit_row + k * comptime!(tiles.output_row_units());
                    p[k] = tile[row * comptime!(tiles.tile_pitch()) + chunk_row / 4 + quad];
                }
                #[unroll]
                for lane in 0..4usize {
                    #[unroll]
                    for v in 0..tiles.staged_vectors {
                        let b_value =
                            stage[(quad * 4 + lane) * width + unit_column + v * tiles.output_units];
                        #[unroll]
                        for k in 0..comptime!(tiles.output_rows()) {
                            let index = comptime!(
                                k * tiles.output_vectors + part * tiles.staged_vectors + v
                            );
                            output[index] += Vec4::cast_from(p[k].extract(lane)) * b_value;
                        }
                    }
                }
            }
        }
    }
}

/// A zero O.
#[cube]
pub(crate) fn zero_output(#[comptime] tiles: UnitTiles) -> Array<Vec4> {
    let count = comptime!(tiles.output_rows() * tiles.output_vectors);
    let mut output = Array::<Vec4>::new(count);
    #[unroll]
    for index in 0..count {
        output[index] = Vec4::new(0.0);
    }
    output
}

/// Factors of 1 in shared memory, for an O that is written as it is. A sync makes them visible.
#[cube]
pub(crate) fn unit_factors(#[comptime] tiles: UnitTiles) -> Shared<[f32]> {
    let mut factors = Shared::<[f32]>::new_slice(tiles.rows);
    #[unroll]
    for step in 0..comptime!(tiles.row_steps()) {
        let row = UNIT_POS as usize + step * tiles.units;
        if row < tiles.rows {
            factors[row] = 1.0f32;
        }
    }
    factors
}

/// Writes a unit's part of O, each row times its factor in shared memory, to the rows of a contiguous
/// tensor. A row whose factor is 0 is 0, whatever was summed up in it: others of its tile may have seen NaN.
#[cube]
pub(crate) fn store_output<E: Float, N: Size>(
    output: &Array<Vec4>,
    factors: &Shared<[f32]>,
    target: &mut Tensor<Vector<E, N>>,
    rows: &Rows,
    first_row: i32,
    #[comptime] packed: bool,
    #[comptime] tiles: UnitTiles,
) {
    let unit_row = UNIT_POS as usize / comptime!(tiles.output_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.output_units);
    let vector_size = target.vector_size();
    #[unroll]
    for k in 0..comptime!(tiles.output_rows()) {
        let tile_row = unit_row + k * comptime!(tiles.output_row_units());
        let row = first_row + tile_row as i32;
        if row < rows.end {
            let offset = row_offset(rows, row as u32, packed);
            let factor = factors[tile_row];
            #[unroll]
            for v in 0..tiles.output_vectors {
                let values = output[comptime!(k * tiles.output_vectors + v)];
                let column = (unit_column + v * tiles.output_units) * 4;
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
                            target[offset + column + lane] = Vector::cast_from(rounded::<E>(
                                scaled(values.extract(lane), factor),
                            ));
                        }
                    }
                }
            }
        }
    }
}

#[cube]
fn scaled(value: f32, factor: f32) -> f32 {
    select(factor == 0.0f32, 0.0f32, value * factor)
}
