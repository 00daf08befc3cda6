//! The tile products by a cube's units: any CubeCL device, no plane operations, f32 throughout.
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
//! On software drivers `direct.rs` does both products without shared memory for the operands; `fragments.rs` does them on the
//! device's matrix units.
//!
//! What bounds it: shared-memory loads in the first product (0.3 loads an FMA at 2 rows a unit, 0.13 at 4),
//! FMA in the second. Shared memory is `stage + P + row statistics`: [`UnitTiles::shared_memory`]. The
//! operands are read again for every block of the other side, from L2: `rows` FMA an element.

use super::cmma::SumFragment;
use super::fragments::FragmentStage;
use super::score_places::{tile_row, unit_column, unit_row};
use super::words::{are_words, codes, word_at};
use super::{direct, fragments, staged};
use crate::math::layout::{Operand, Rows, row_offset};
use crate::math::rounding::{rounded, rounded_vector};
use crate::tile::tiles::{Products, UnitTiles};
use cubecl::prelude::*;

/// Four elements, the unit of every shared-memory access.
pub(crate) type Four<C> = Vector<C, Const<4>>;

/// Four f32.
pub(crate) type Vec4 = Four<f32>;

/// Where the operands of a product are in shared memory, in the elements that are multiplied.
#[expect(
    dead_code,
    reason = "made by the functions that CubeCL's macros write beside it"
)]
#[derive(CubeType)]
pub(crate) enum Stage<C: Float> {
    /// Units multiply f32.
    Units(Shared<[Vec4]>),
    /// Planes multiply fragments.
    Fragments(FragmentStage<C>),
}

/// A tile of S's shape in shared memory, the left operand of the second product.
#[expect(
    dead_code,
    reason = "made by the functions that CubeCL's macros write beside it"
)]
#[derive(CubeType)]
pub(crate) enum LeftTile<C: Float> {
    /// Units multiply f32.
    Units(Shared<[Vec4]>),
    /// Planes multiply fragments.
    Fragments(Shared<[Four<C>]>),
}

/// The sums of the second product.
#[expect(
    dead_code,
    reason = "made by the functions that CubeCL's macros write beside it"
)]
#[derive(CubeType)]
pub(crate) enum TileOutput {
    /// A unit's: `[k · output_vectors + v]` is the row `unit_row + k · output_row_units`, the vector of columns
    /// `unit_column + v · output_units`.
    Units(Array<Vec4>),
    /// A plane's: `[r · output_fragments + c]`, see `fragments.rs`.
    Fragments(Sequence<SumFragment>),
}

/// Shared memory for the operands.
#[cube]
pub(crate) fn new_stage<C: Float>(#[comptime] tiles: UnitTiles) -> Stage<C> {
    match comptime!(tiles.products) {
        Products::Fragments(_) => Stage::new_Fragments(fragments::new_stage::<C>(tiles)),
        _ => Stage::new_Units(Shared::new_slice(comptime!(tiles.stage_vectors()))),
    }
}

/// Shared memory for a tile of S's shape.
#[cube]
pub(crate) fn new_tile<C: Float>(#[comptime] tiles: UnitTiles) -> LeftTile<C> {
    match comptime!(tiles.products) {
        Products::Fragments(_) => LeftTile::new_Fragments(fragments::new_tile::<C>(tiles)),
        _ => LeftTile::new_Units(Shared::new_slice(comptime!(tiles.tile_vectors()))),
    }
}

/// Four zeros.
#[cube]
pub(super) fn zeros<C: Float>() -> Four<C> {
    Four::<C>::cast_from(0.0f32)
}

/// Four columns of a row from `column` on, in f32; zero where there are none.
#[cube]
pub(crate) fn load_vec4<E: Numeric, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    offset: usize,
    column: u32,
) -> Vec4 {
    load_four::<E, f32, N>(source, rows, offset, column)
}

/// Four columns of a row from `column` on; zero where there are none: the first ones are read in their place, since compilers let a read
/// behind a branch end before the next begins. Of words, their codes.
#[cube]
pub(super) fn load_four<E: Numeric, C: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    offset: usize,
    column: u32,
) -> Four<C> {
    let vector_size = source.vector_size();
    let words = are_words::<E>();
    let mut values = zeros::<C>();
    let is_there = column < rows.columns;
    let first = select(is_there, column, 0u32);
    if comptime!(words) {
        values = codes::<C>(word_at(source, offset, first));
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

/// `S = A Bᵀ` for the tile's rows of `a` and a block's rows of `b`: S of unit `(y, x)` at
/// `[k · columns_per_unit + c]` is the row `y + k · row_units`, the column `tile_column(x, c)`.
///
/// Where there is no such row, S is anything. `stationary` numbers the kernel's stationary operands, and the streamed ones that they meet, in the
/// order of their products: where tiles hold them, each is the same `a` from `a_first` on for every block.
#[cube]
pub(crate) fn multiply_transposed<E: Numeric, B: Numeric, C: Float, N: Size, W: Size>(
    a: &Operand<'_, E, N>,
    a_first: i32,
    b: &Operand<'_, B, W>,
    b_first: i32,
    stage: &mut Stage<C>,
    s: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
    #[comptime] a_packed: bool,
    #[comptime] stationary: usize,
) {
    match stage {
        Stage::Fragments(stage) => {
            fragments::multiply_transposed(
                a, a_first, b, b_first, stage, s, tiles, a_packed, stationary,
            );
        }
        Stage::Units(stage) => {
            if comptime!(tiles.is_direct()) {
                direct::multiply_transposed(a, a_first, b, b_first, s, tiles, a_packed);
            } else {
                staged::multiply_transposed(a, a_first, b, b_first, stage, s, tiles, a_packed);
            }
        }
    }
}

/// Copies a stationary operand of the first product to shared memory, if tiles hold it there. It is visible to all units when the first product
/// needs it.
#[cube]
pub(crate) fn hold<E: Numeric, C: Float, N: Size>(
    a: &Operand<'_, E, N>,
    a_first: i32,
    stage: &mut Stage<C>,
    #[comptime] a_packed: bool,
    #[comptime] stationary: usize,
    #[comptime] tiles: UnitTiles,
) {
    match stage {
        Stage::Fragments(stage) => {
            if comptime!(stationary < tiles.held()) {
                fragments::hold(a, a_first, stage, a_packed, stationary, tiles);
            }
        }
        Stage::Units(_) => {}
    }
}

/// Copies a block's rows of both streamed operands to shared memory, if that is where tiles have both. The numbers of streamed operands are
/// 0 and 1 in this order.
#[cube]
pub(crate) fn stage_block<E: Numeric, C: Float, N: Size>(
    b: &Operand<'_, E, N>,
    other: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut Stage<C>,
    #[comptime] tiles: UnitTiles,
) {
    match stage {
        Stage::Fragments(stage) => {
            if comptime!(tiles.is_resident()) {
                fragments::stage_block(b, other, b_first, stage, tiles);
            }
        }
        Stage::Units(_) => {}
    }
}

/// Writes a unit's part of a tile of S's shape to shared memory, where the product with the streamed operand of this number finds it.
#[cube]
pub(crate) fn store_tile<C: Float>(
    s: &Array<f32>,
    tile: &mut LeftTile<C>,
    #[comptime] streamed: usize,
    #[comptime] tiles: UnitTiles,
) {
    match tile {
        LeftTile::Units(tile) => store_rounded::<f32>(s, tile, 0usize, tiles),
        LeftTile::Fragments(tile) => {
            store_rounded::<C>(s, tile, comptime!(tiles.left_tile_at(streamed)), tiles)
        }
    }
}

/// [`store_tile`], rounded to the tile's elements, from the vector `at` on.
#[cube]
pub(crate) fn store_rounded<C: Float>(
    s: &Array<f32>,
    tile: &mut Shared<[Four<C>]>,
    #[comptime] at: usize,
    #[comptime] tiles: UnitTiles,
) {
    let unit_row = unit_row(tiles);
    let unit_column = unit_column(tiles);
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
            tile[at + row * comptime!(tiles.tile_pitch()) + column] =
                rounded_vector::<C, Const<4>>(values);
        }
    }
}

/// Waits, after tiles were written, for what the second product needs: that they are visible where it does not wait for copies, and that
/// nobody multiplies out of the stage any more where planes do not wait for each other's scores.
#[cube]
pub(crate) fn sync_tiles(#[comptime] tiles: UnitTiles) {
    if comptime!(tiles.is_resident() || tiles.keeps_last() || tiles.owns_scores()) {
        sync_cube();
    }
}

/// Marks the columns of the tile, from the vector `at` on, that hold anything but zeros. Between two syncs.
#[cube]
pub(super) fn mark_used<C: Float>(
    tile: &Shared<[Four<C>]>,
    #[comptime] at: usize,
    used: &mut Shared<[u32]>,
    #[comptime] tiles: UnitTiles,
) {
    sync_cube();
    #[unroll]
    for step in 0..comptime!(tiles.columns().div_ceil(tiles.units)) {
        let column = UNIT_POS as usize + step * tiles.units;
        if column < comptime!(tiles.columns()) {
            let mut any = 0u32;
            for row in 0..tiles.rows {
                let values = tile[at + row * comptime!(tiles.tile_pitch()) + column / 4];
                #[unroll]
                for lane in 0..4usize {
                    // Vulkan has no comparison of numbers in bf16.
                    let value = f32::cast_from(values.extract(lane));
                    if lane == column % 4 && value != 0.0f32 {
                        any = 1u32;
                    }
                }
            }
            used[column] = any;
        }
    }
    sync_cube();
}

/// `O += P B` for the tile P in shared memory and the block's rows of `b`, the streamed operand of this number. Starts before the tile is visible
/// to all units, but where tiles have both streamed operands in shared memory, and ends with tile and stage still being read.
///
/// Where the tile `has_masked`, rows of `b` that meet nothing but zeros do not count: they may hold NaN.
#[cube]
pub(crate) fn accumulate<E: Numeric, C: Float, N: Size>(
    tile: &LeftTile<C>,
    b: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut Stage<C>,
    used: &mut Shared<[u32]>,
    output: &mut TileOutput,
    #[comptime] streamed: usize,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    match output {
        TileOutput::Fragments(output) => match tile {
            LeftTile::Fragments(tile) => match stage {
                Stage::Fragments(stage) => fragments::accumulate(
                    tile, b, b_first, stage, used, output, streamed, has_masked, tiles,
                ),
                Stage::Units(_) => panic!("units have no fragments"),
            },
            LeftTile::Units(_) => panic!("units have no fragments"),
        },
        TileOutput::Units(output) => match tile {
            LeftTile::Units(tile) => {
                if comptime!(has_masked) {
                    mark_used::<f32>(tile, 0usize, used, tiles);
                }
                if comptime!(tiles.is_direct()) {
                    if comptime!(!has_masked) {
                        sync_cube();
                    }
                    direct::accumulate(tile, b, b_first, used, output, has_masked, tiles);
                } else {
                    match stage {
                        Stage::Units(stage) => staged::accumulate(
                            tile, b, b_first, stage, &*used, output, has_masked, tiles,
                        ),
                        Stage::Fragments(_) => panic!("fragments have no units"),
                    }
                }
            }
            LeftTile::Fragments(_) => panic!("fragments have no units"),
        },
    }
}

/// Multiplies the rows of O by their factors: brings it to other references. `moved` tells whether any row of a group has a factor other
/// than 1 where planes have O in fragments, and need not be visible yet to all units.
#[cube]
pub(crate) fn rescale<C: Float>(
    output: &mut TileOutput,
    factors: &Shared<[f32]>,
    moved: &Shared<[u32]>,
    stage: &mut Stage<C>,
    #[comptime] tiles: UnitTiles,
) {
    match output {
        TileOutput::Units(output) => {
            let row = UNIT_POS as usize / comptime!(tiles.output_units);
            #[unroll]
            for k in 0..comptime!(tiles.output_rows()) {
                let factor =
                    Vec4::cast_from(factors[row + k * comptime!(tiles.output_row_units())]);
                #[unroll]
                for v in 0..tiles.output_vectors {
                    output[comptime!(k * tiles.output_vectors + v)] *= factor;
                }
            }
        }
        TileOutput::Fragments(output) => match stage {
            Stage::Fragments(stage) => fragments::rescale(output, factors, moved, stage, tiles),
            Stage::Units(_) => panic!("units have no fragments"),
        },
    }
}

/// A zero O.
#[cube]
pub(crate) fn zero_output(#[comptime] tiles: UnitTiles) -> TileOutput {
    match comptime!(tiles.products) {
        Products::Fragments(_) => TileOutput::new_Fragments(fragments::zero_output(tiles)),
        _ => {
            let count = comptime!(tiles.output_rows() * tiles.output_vectors);
            let mut output = Array::<Vec4>::new(count);
            #[unroll]
            for index in 0..count {
                output[index] = Vec4::new(0.0);
            }
            TileOutput::new_Units(output)
        }
    }
}

/// The same factor for all rows in shared memory. A sync makes it visible.
#[cube]
pub(crate) fn row_factors(factor: f32, #[comptime] tiles: UnitTiles) -> Shared<[f32]> {
    let mut factors = Shared::<[f32]>::new_slice(tiles.rows);
    #[unroll]
    for step in 0..comptime!(tiles.row_steps()) {
        let row = UNIT_POS as usize + step * tiles.units;
        if row < tiles.rows {
            factors[row] = factor;
        }
    }
    factors
}

/// Writes O, each row times its factor in shared memory, to the rows of a contiguous tensor. A row whose factor is 0 is 0, whatever was
/// summed up in it: others of its tile may have seen NaN. Starts after the factors and the stage are visible to all units.
#[cube]
pub(crate) fn store_output<E: Float, C: Float, N: Size>(
    output: &TileOutput,
    factors: &Shared<[f32]>,
    stage: &mut Stage<C>,
    target: &mut Tensor<Vector<E, N>>,
    rows: &Rows,
    first_row: i32,
    #[comptime] packed: bool,
    #[comptime] tiles: UnitTiles,
) {
    match output {
        TileOutput::Units(output) => {
            let unit_row = UNIT_POS as usize / comptime!(tiles.output_units);
            let unit_column = UNIT_POS as usize % comptime!(tiles.output_units);
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
                        store_scaled(values, factor, target, rows, offset, column);
                    }
                }
            }
        }
        TileOutput::Fragments(output) => match stage {
            Stage::Fragments(stage) => fragments::store_output(
                output, factors, stage, target, rows, first_row, packed, tiles,
            ),
            Stage::Units(_) => panic!("units have no fragments"),
        },
    }
}

/// Writes four columns of a row that starts at `offset`, from `column` on, as far as there are so many.
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
