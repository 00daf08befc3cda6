//! The tile products by a cube's units where operands are read where they lie.
//!
//! For software drivers, whose shared memory is no nearer than the rest: copying an operand there first costs
//! two accesses an element, and two barriers a copy. Mesa's llvmpipe runs 8 units as one vector, does
//! arithmetic in one instruction for all of them, and every load and store unit by unit: of 4 elements, some 40
//! instructions a unit. So accesses bound everything:
//!
//! | product | a unit holds | loads of 4 a multiply-add |
//! |---|---|---|
//! | [`multiply_transposed`] | 8 × 8 of S; 16 × 16 in the backward of wide heads | 0.063; 0.031 |
//! | [`accumulate`] | up to 16 × 32 of O, in registers | 0.023 |
//! | [`add_transposed`] | up to 16 × 32, and adds it to what lies in memory | 0.031 |

use super::product::{Vec4, load_vec4};
use super::score_places::{tile_column, tile_row};
use super::words::{are_words, codes, word_at};
use crate::math::layout::{Operand, Rows, row_offset};
use crate::tile::tiles::UnitTiles;
use cubecl::prelude::*;

/// The offset of `row`, or of one that may be read where it may not.
#[cube]
fn readable(rows: &Rows, row: i32, #[comptime] packed: bool) -> usize {
    let nearest = max(min(max(row, rows.first), rows.end - 1i32), 0i32);
    row_offset(rows, nearest as u32, packed)
}

/// Four columns of a row that may be read: `column` on, or where there are none, any that there are.
#[cube]
fn load<E: Numeric, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    offset: usize,
    column: u32,
) -> Vec4 {
    let vector_size = source.vector_size();
    let words = are_words::<E>();
    if comptime!(words) {
        let nearest = min(column, rows.columns - 4u32);
        codes::<f32>(word_at(source, offset, nearest))
    } else if comptime!(vector_size == 4) {
        let nearest = min(column, rows.columns - 4u32);
        Vec4::cast_from(source[(offset + nearest as usize) / 4])
    } else {
        load_vec4(source, rows, offset, column)
    }
}

/// See [`multiply_transposed`](super::product::multiply_transposed).
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
                // Four products first: a single chain over 512 columns would lose two more bits, which
                // shows where the backward subtracts Δ from dP.
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

/// See [`accumulate`](super::product::accumulate); the tile is visible to all units.
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

/// Writes a unit's part of a tile of S's shape to shared memory, transposed.
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

/// How units divide a sum in memory, and in how many turns they pass over its columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Division {
    /// Vectors of 4 rows of a unit.
    row_vectors: usize,
    /// Vectors of 4 columns of a unit in one turn.
    column_vectors: usize,
    /// Units side by side.
    across: usize,
    schedule: usize,
}

/// The division of `rows` × `width`: up to 16 × 32 a unit.
pub(crate) fn division(units: usize, rows: usize, width: usize) -> Division {
    let row_vectors = match width {
        0..=32 => 1,
        33..=128 => 2,
        _ => 4,
    };
    let across = units * 4 * row_vectors / rows;
    let of_unit = width.div_ceil(4 * across);
    let schedule = of_unit.div_ceil(8);
    Division {
        row_vectors,
        column_vectors: of_unit.div_ceil(schedule),
        across,
        schedule,
    }
}

/// Iterations of the loops of [`add_transposed`], at most.
pub(crate) const fn add_iterations(division: Division, tiles: &UnitTiles) -> usize {
    division.schedule * (tiles.rows + 1) + tiles.row_steps() * tiles.columns() / 4
}

/// `T += Pᵀ B` for the square tile P in shared memory and as many rows of `b`. T's rows lie in a buffer, from
/// `target_first` on; each of its elements is always the same unit's. Starts before the tile is visible to
/// all units, and ends with it still being read.
///
/// Where the tile `has_masked`, rows of `b` that meet nothing but zeros do not count: they may hold NaN.
#[cube]
pub(crate) fn add_transposed<E: Numeric, N: Size>(
    tile: &Shared<[Vec4]>,
    b: &Operand<'_, E, N>,
    b_first: i32,
    used: &mut Shared<[u32]>,
    target: &mut Tensor<Vector<f32, N>>,
    target_rows: &Rows,
    target_first: i32,
    #[comptime] division: Division,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    let unit_row = UNIT_POS as usize / comptime!(division.across);
    let unit_column = UNIT_POS as usize % comptime!(division.across);
    let rows = comptime!(4 * division.row_vectors);
    let vectors = comptime!(division.column_vectors);
    let vector_size = target.vector_size();
    sync_cube();
    if comptime!(has_masked) {
        mark_used_rows(tile, used, tiles);
    }
    let mut sum = Array::<Vec4>::new(comptime!(rows * vectors));
    for turn in 0..division.schedule {
        let first_vector = turn * comptime!(vectors * division.across) + unit_column;
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
            let mut p = Array::<Vec4>::new(division.row_vectors);
            #[unroll]
            for k in 0..division.row_vectors {
                let at = step * comptime!(tiles.tile_pitch());
                p[k] = tile[at + unit_row * division.row_vectors + k];
            }
            #[unroll]
            for v in 0..vectors {
                let column = ((first_vector + v * division.across) * 4) as u32;
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
                    let column = (first_vector + v * division.across) * 4;
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

/// Marks the rows of the tile that hold anything but zeros. Ends with a sync.
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
