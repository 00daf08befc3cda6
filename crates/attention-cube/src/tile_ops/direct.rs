//! Tile multiplications (QKᵀ and PV) for software drivers. The units read their operands from global memory.
//!
//! On a software driver, shared memory is as slow as any other memory. Mesa's llvmpipe runs 8 units as one vector, but
//! executes a load or a store for one unit after another. A load or store of 4 elements takes about 40 instructions per
//! unit. Memory accesses therefore limit the speed:
//!
//! | function | elements in registers per unit | loads of 4 elements per multiply-add |
//! |---|---|---|
//! | [`multiply_transposed`] | 8 × 8 of S; 16 × 16 in the backward pass with a wide head_dim | 0.063; 0.031 |
//! | [`accumulate`] | up to 16 × 32 of O | 0.023 |
//! | [`add_transposed`] | up to 16 × 32 of a product, which are added to the sum in memory | 0.031 |

use super::code_rows::{codes, is_packed, word_at};
use super::row_access::load_vec4;
use super::score_layout::{tile_column, tile_row};
use super::vec4::Vec4;
use crate::math::layout::{Operand, Rows, row_offset};
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// Clamps `row` to the range of rows that kernels may read, and returns the offset of the clamped row.
#[cube]
fn readable(rows: &Rows, row: i32, #[comptime] packed: bool) -> usize {
    let nearest = max(min(max(row, rows.first), rows.end - 1i32), 0i32);
    row_offset(rows, nearest as u32, packed)
}

/// Loads the columns `column` to `column + 3` of the row at `offset`. For a column past the row's end, the function
/// returns zero or an element of another column. Such an element has no effect on the stored results.
#[cube]
fn load<E: Numeric, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    offset: usize,
    column: u32,
) -> Vec4 {
    let vector_size = source.vector_size();
    let words = is_packed::<E>();
    if comptime!(words) {
        let nearest = min(column, rows.columns - 4u32);
        codes::<E, f32>(word_at(source, offset, nearest))
    } else if comptime!(vector_size == 4) {
        let nearest = min(column, rows.columns - 4u32);
        Vec4::cast_from(source[(offset + nearest as usize) / 4])
    } else {
        load_vec4(source, rows, offset, column)
    }
}

/// Computes [`multiply_transposed`](super::product::multiply_transposed) with operands in global memory.
#[cube]
pub(super) fn multiply_transposed<E: Numeric, B: Numeric, N: Size, W: Size>(
    a: &Operand<'_, E, N>,
    a_first: i32,
    b: &Operand<'_, B, W>,
    b_first: i32,
    s: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
    #[comptime] a_packed: bool,
) {
    let width = comptime!(tiles.columns_per_unit());
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);
    #[unroll]
    for index in 0..comptime!(tiles.scores_per_unit()) {
        s[index] = 0.0f32;
    }
    let mut a_at = Array::<usize>::new(comptime!(tiles.rows_per_unit()));
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        let row = a_first + tile_row(unit_row, k, tiles) as i32;
        a_at[k] = readable(&a.rows, row, a_packed);
    }
    let mut b_at = Array::<usize>::new(width);
    #[unroll]
    for c in 0..width {
        let row = b_first + tile_column(unit_column, c, tiles) as i32;
        b_at[c] = readable(&b.rows, row, false);
    }
    let vectors = a.rows.columns.div_ceil(4u32);
    for vector in 0..vectors {
        let column = vector * 4u32;
        let mut b_values = Array::<Vec4>::new(width);
        #[unroll]
        for c in 0..width {
            b_values[c] = load(b.tensor, &b.rows, b_at[c], column);
        }
        #[unroll]
        for k in 0..comptime!(tiles.rows_per_unit()) {
            let a_value = load(a.tensor, &a.rows, a_at[k], column);
            #[unroll]
            for c in 0..width {
                let b_value = b_values[c];
                // Add four products to each other, and then add the sum of the four to the accumulator. If the products
                // of 512 columns were added to the accumulator one by one, the result would lose two more bits. In the
                // backward pass, the difference `dP − delta` would amplify this error.
                let mut sum = a_value.extract(0usize) * b_value.extract(0usize);
                #[unroll]
                for lane in 1..4usize {
                    sum += a_value.extract(lane) * b_value.extract(lane);
                }
                s[comptime!(k * width + c)] += sum;
            }
        }
    }
}

/// Computes [`accumulate`](super::product::accumulate) with `b` in global memory. `tile` is P in shared memory. Before
/// the call, the caller must sync the cube, so that all units see P.
#[cube]
pub(super) fn accumulate<E: Numeric, N: Size>(
    tile: &Shared<[Vec4]>,
    b: &Operand<'_, E, N>,
    b_first: i32,
    used: &mut Shared<[u32]>,
    output: &mut Array<Vec4>,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    let unit_row = UNIT_POS as usize / comptime!(tiles.output_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.output_units);
    for quad in 0..comptime!(tiles.columns() / 4) {
        let mut p = Array::<Vec4>::new(comptime!(tiles.output_rows()));
        #[unroll]
        for k in 0..comptime!(tiles.output_rows()) {
            let row = unit_row + k * comptime!(tiles.output_row_units());
            p[k] = tile[row * comptime!(tiles.tile_pitch()) + quad];
        }
        #[unroll]
        for lane in 0..4usize {
            let row = b_first + (quad * 4 + lane) as i32;
            let mut wanted = row >= b.rows.first && row < b.rows.end;
            if comptime!(has_masked) {
                wanted = wanted && used[quad * 4 + lane] != 0u32;
            }
            let offset = readable(&b.rows, row, false);
            #[unroll]
            for v in 0..tiles.output_vectors {
                let column = ((unit_column + v * tiles.output_units) * 4) as u32;
                let mut b_value = load(b.tensor, &b.rows, offset, column);
                b_value = select(wanted, b_value, Vec4::new(0.0));
                #[unroll]
                for k in 0..comptime!(tiles.output_rows()) {
                    output[comptime!(k * tiles.output_vectors + v)] +=
                        Vec4::cast_from(p[k].extract(lane)) * b_value;
                }
            }
        }
    }
}

/// Writes a tile with the shape of S to shared memory in transposed form. Each unit writes the elements that it holds.
#[cube]
pub(crate) fn store_transposed(
    s: &Array<f32>,
    tile: &mut Shared<[Vec4]>,
    #[comptime] tiles: UnitTiles,
) {
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);
    #[unroll]
    for c in 0..comptime!(tiles.columns_per_unit()) {
        let at = tile_column(unit_column, c, tiles) * comptime!(tiles.rows / 4 + 1);
        #[unroll]
        for quad in 0..comptime!(tiles.rows_per_unit() / 4) {
            let mut values = Vec4::new(0.0);
            #[unroll]
            for k in 0..4usize {
                values.insert(
                    k,
                    s[comptime!((4 * quad + k) * tiles.columns_per_unit() + c)],
                );
            }
            tile[at + unit_row + comptime!(quad * tiles.row_units())] = values;
        }
    }
}

/// The division of an accumulator in global memory among the units. A unit computes its columns in one or more passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SumTiling {
    /// The number of vectors of 4 rows that each unit computes.
    row_vectors: usize,
    /// The number of vectors of 4 columns that each unit computes in one pass.
    column_vectors: usize,
    /// The number of units along a row of the accumulator.
    across: usize,
    schedule: usize,
}

/// Divides an accumulator of `rows` × `width` elements among the units. In one pass over the columns, a unit computes
/// at most 16 × 32 elements.
pub(crate) fn sum_tiling(units: usize, rows: usize, width: usize) -> SumTiling {
    let row_vectors = match width {
        0..=32 => 1,
        33..=128 => 2,
        _ => 4,
    };
    let across = units * 4 * row_vectors / rows;
    let of_unit = width.div_ceil(4 * across);
    let schedule = of_unit.div_ceil(8);
    SumTiling {
        row_vectors,
        column_vectors: of_unit.div_ceil(schedule),
        across,
        schedule,
    }
}

/// Returns an upper bound of the loop iterations that one unit runs in [`add_transposed`].
pub(crate) const fn add_iterations(sum_tiling: SumTiling, tiles: &UnitTiles) -> usize {
    sum_tiling.schedule * (tiles.rows + 1) + tiles.row_steps() * tiles.columns() / 4
}

/// Computes `T += Pᵀ B`. P is the square tile in shared memory. B consists of as many rows of `b` as P has rows.
///
/// T is a block of rows of a buffer in global memory. The first row of T is row `target_first` of the buffer. The
/// function syncs the cube before it reads the tile. When the function returns, other units may still be reading the
/// tile.
///
/// Set `has_masked` if the tile may have hidden scores. If a row of P is all zero, the function then skips the matching
/// row of `b`, which may contain NaN.
#[cube]
pub(crate) fn add_transposed<E: Numeric, N: Size>(
    tile: &Shared<[Vec4]>,
    b: &Operand<'_, E, N>,
    b_first: i32,
    used: &mut Shared<[u32]>,
    target: &mut Tensor<Vector<f32, N>>,
    target_rows: &Rows,
    target_first: i32,
    #[comptime] sum_tiling: SumTiling,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    let unit_row = UNIT_POS as usize / comptime!(sum_tiling.across);
    let unit_column = UNIT_POS as usize % comptime!(sum_tiling.across);
    let rows = comptime!(4 * sum_tiling.row_vectors);
    let vectors = comptime!(sum_tiling.column_vectors);
    let vector_size = target.vector_size();
    sync_cube();
    if comptime!(has_masked) {
        mark_used_rows(tile, used, tiles);
    }
    let mut sum = Array::<Vec4>::new(comptime!(rows * vectors));
    for turn in 0..sum_tiling.schedule {
        let first_vector = turn * comptime!(vectors * sum_tiling.across) + unit_column;
        #[unroll]
        for index in 0..comptime!(rows * vectors) {
            sum[index] = Vec4::new(0.0);
        }
        for step in 0..tiles.rows {
            let row = b_first + step as i32;
            let mut wanted = row >= b.rows.first && row < b.rows.end;
            if comptime!(has_masked) {
                wanted = wanted && used[step] != 0u32;
            }
            let offset = readable(&b.rows, row, false);
            let mut p = Array::<Vec4>::new(sum_tiling.row_vectors);
            #[unroll]
            for k in 0..sum_tiling.row_vectors {
                let at = step * comptime!(tiles.tile_pitch());
                p[k] = tile[at + unit_row * sum_tiling.row_vectors + k];
            }
            #[unroll]
            for v in 0..vectors {
                let column = ((first_vector + v * sum_tiling.across) * 4) as u32;
                let mut b_value = load(b.tensor, &b.rows, offset, column);
                b_value = select(wanted, b_value, Vec4::new(0.0));
                #[unroll]
                for k in 0..rows {
                    sum[comptime!(k * vectors + v)] +=
                        Vec4::cast_from(p[comptime!(k / 4)].extract(comptime!(k % 4))) * b_value;
                }
            }
        }
        #[unroll]
        for k in 0..rows {
            let row = target_first + (unit_row * rows + k) as i32;
            if row < target_rows.end {
                let offset = row_offset(target_rows, row as u32, false);
                #[unroll]
                for v in 0..vectors {
                    let values = sum[comptime!(k * vectors + v)];
                    let column = (first_vector + v * sum_tiling.across) * 4;
                    if comptime!(vector_size == 4) {
                        if (column as u32) < target_rows.columns {
                            target[(offset + column) / 4] += Vector::cast_from(values);
                        }
                    } else {
                        #[unroll]
                        for lane in 0..4usize {
                            if ((column + lane) as u32) < target_rows.columns {
                                target[offset + column + lane] +=
                                    Vector::cast_from(values.extract(lane));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Marks the rows of the tile that contain a nonzero element. The function syncs the cube at its end.
#[cube]
fn mark_used_rows(tile: &Shared<[Vec4]>, used: &mut Shared<[u32]>, #[comptime] tiles: UnitTiles) {
    #[unroll]
    for step in 0..comptime!(tiles.row_steps()) {
        let row = UNIT_POS as usize + step * tiles.units;
        if row < tiles.rows {
            let mut any = 0u32;
            for vector in 0..comptime!(tiles.columns() / 4) {
                let values = tile[row * comptime!(tiles.tile_pitch()) + vector];
                #[unroll]
                for lane in 0..4usize {
                    if values.extract(lane) != 0.0f32 {
                        any = 1u32;
                    }
                }
            }
            used[row] = any;
        }
    }
    sync_cube();
}
