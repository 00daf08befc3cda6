//! Tile multiplications by the units of a cube, in f32 throughout. The multiplications use no plane operations, so they
//! run on any CubeCL device.
//!
//! Algorithm: a cube of `units` units keeps `rows` stationary rows (such as queries). It streams the rows of the opposite
//! side (such as keys) in blocks of `columns` rows. The first product is `S = A Bᵀ`, the second is `O += P B`. Both products
//! read their operands from shared memory in vectors of 4 elements.
//!
//! Budget:
//!
//! | product | elements in registers per unit | shared-memory loads per unit (16 bytes each) | FMAs per unit |
//! |---|---|---|---|
//! | [`multiply_transposed`]: `S = A Bᵀ`, depth in chunks | `rows_per_unit × 4` of S | `rows_per_unit + 4` for 4 columns | `16 · rows_per_unit` for 4 columns |
//! | [`accumulate`]: `O += P B`, streamed rows in chunks | `output_rows × 4 output_vectors` of O | `output_rows + 4 output_vectors` for 4 keys | `16 · output_rows · output_vectors` for 4 keys |
//!
//! On software drivers, `direct.rs` computes both products without shared memory for the operands. On matrix units,
//! `fragments.rs` computes both products.
//!
//! Shared-memory loads limit the speed of the first product (0.19 loads per FMA with 2 rows per unit, 0.13 with 4 rows).
//! FMAs limit the speed of the second product. Shared memory holds the stage (the operands' chunks), P and row statistics:
//! see [`UnitTiles::shared_memory`]. Each streamed element takes part in `rows` FMAs per read from L2.

use super::cmma::SumFragment;
use super::fragments::stage::FragmentStage;
use super::row_access::store_scaled;
use super::score_layout::{tile_row, unit_column, unit_row};
use super::used_columns::mark_used;
use super::vec4::{Four, Vec4};
use super::{direct, fragments, staged};
use crate::math::layout::{Operand, Rows, row_offset};
use crate::math::rounding::rounded_vector;
use crate::tile_ops::tiles::{Products, UnitTiles};
use cubecl::prelude::*;

/// The stage: shared memory for the operands of a product, in the element type that units or planes multiply.
#[expect(
    dead_code,
    reason = "constructed only by functions that CubeCL's macros generate"
)]
#[derive(CubeType)]
pub(crate) enum Stage<C: Float> {
    /// The operands' shared memory for units that multiply f32.
    Units(Shared<[Vec4]>),
    /// The operands' shared memory for planes that multiply fragments.
    Fragments(FragmentStage<C>),
}

/// A tile with the shape of S, such as P, in shared memory. The tile is the left operand of the second product
/// (`O += P B`).
#[expect(
    dead_code,
    reason = "constructed only by functions that CubeCL's macros generate"
)]
#[derive(CubeType)]
pub(crate) enum LeftTile<C: Float> {
    /// The tile for units that multiply f32.
    Units(Shared<[Vec4]>),
    /// The tile for planes that multiply fragments.
    Fragments(Shared<[Four<C>]>),
}

/// The accumulator O of the second product (`O += P B`), in registers.
#[expect(
    dead_code,
    reason = "constructed only by functions that CubeCL's macros generate"
)]
#[derive(CubeType)]
pub(crate) enum TileOutput {
    /// The vectors of 4 columns that a unit holds. The vector at index `k · output_vectors + v` belongs to row
    /// `unit_row + k · output_row_units` of O. In this row, it is the vector number `unit_column + v · output_units`,
    /// counted from 0.
    Units(Array<Vec4>),
    /// A plane's fragments. `fragments/output.rs` describes the order of the fragments.
    Fragments(Sequence<SumFragment>),
}

/// Allocates shared memory for the operands.
#[cube]
pub(crate) fn new_stage<C: Float>(#[comptime] tiles: UnitTiles) -> Stage<C> {
    match comptime!(tiles.products) {
        Products::Fragments(_) => Stage::new_Fragments(fragments::new_stage::<C>(tiles)),
        _ => Stage::new_Units(Shared::new_slice(comptime!(tiles.stage_vectors()))),
    }
}

/// Allocates shared memory for a tile with the shape of S.
#[cube]
pub(crate) fn new_tile<C: Float>(#[comptime] tiles: UnitTiles) -> LeftTile<C> {
    match comptime!(tiles.products) {
        Products::Fragments(_) => LeftTile::new_Fragments(fragments::new_tile::<C>(tiles)),
        _ => LeftTile::new_Units(Shared::new_slice(comptime!(tiles.tile_vectors()))),
    }
}

/// Computes `S = A Bᵀ` for the tile's rows of `a` and a block's rows of `b`.
///
/// A unit with `y = unit_row()` and `x = unit_column()` holds, at index `k · columns_per_unit + c`, the score of row
/// `tile_row(y, k)` and column `tile_column(x, c)`. Scores of rows that do not exist are undefined.
///
/// Backward kernels call the function twice per block, for S and for dP. The tile keeps the rows of two stationary
/// operands: the left operand of S and the left operand of dP. `stationary` is the index (0 or 1) of `a` among these
/// two operands. If these operands stay in shared memory, `a` and `a_first` must be the same for every block.
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

/// Copies a stationary operand of the first product (such as Q) to shared memory. If this operand does not stay in
/// shared memory for all blocks, the function does nothing.
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

/// Copies a block's rows of both streamed operands (such as K and V) to shared memory. `b` is streamed operand 0, and
/// `other` is streamed operand 1. If the rows do not stay in shared memory for both products (`S = A Bᵀ` and
/// `O += P B`), the function does nothing.
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

/// Writes a tile with the shape of S, such as P, to shared memory. Each unit writes its own elements of the tile.
/// `streamed` is the index of the streamed operand (such as V) by which the second product multiplies the tile.
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

/// Rounds the unit's own elements of a tile, and writes the rounded elements to shared memory as [`store_tile`] does.
/// In shared memory, the tile starts at vector `at`.
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

/// Synchronizes the cube after units have written the tile P and before the second product (`O += P B`). The function
/// does so in two cases:
///
/// - The rows of B are already in shared memory. The second product then does not sync before it reads P.
/// - Each unit reads only scores of its own plane. A plane may then still be reading operands that the second product
///   overwrites in shared memory.
#[cube]
pub(crate) fn sync_tiles(#[comptime] tiles: UnitTiles) {
    if comptime!(tiles.is_resident() || tiles.keeps_last() || tiles.owns_scores()) {
        sync_cube();
    }
}

/// Computes `O += P B` from the tile P in shared memory and the block's rows of the streamed operand `b`. `streamed` is
/// the index of `b` among the streamed operands.
///
/// If the rows of `b` are not yet in shared memory, the function syncs the cube before it reads P. Otherwise the caller
/// must sync: see [`sync_tiles`]. When the function returns, other units may still be reading P and `b` in shared
/// memory.
///
/// Set `has_masked` if the tile may have hidden scores. If a column of P is all zero, the function then skips the
/// matching row of `b`, which may contain NaN.
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
                Stage::Units(_) => panic!("expected a stage in fragments"),
            },
            LeftTile::Units(_) => panic!("expected a left tile in fragments"),
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
                        Stage::Fragments(_) => panic!("expected a stage for units"),
                    }
                }
            }
            LeftTile::Fragments(_) => panic!("expected a left tile for units"),
        },
    }
}

/// Multiplies each row of O by the row's factor, after row maxima have changed.
///
/// If O consists of fragments, `moved` has one flag per group of rows. A flag is nonzero if the factor of any row of
/// the group is not 1. The function syncs the cube before it reads the flags, so the caller need not sync the cube
/// after writing the flags.
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
            Stage::Units(_) => panic!("expected a stage in fragments"),
        },
    }
}

/// Returns an accumulator O that is filled with zeros.
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

/// Writes the factors of all rows of O to shared memory, and returns this shared memory. Each unit passes one `factor`.
/// The factor of unit `u` is written for each row `i` with `i % units = u`. The caller must sync the cube before units
/// read the factors.
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

/// Multiplies each row of O by the row's factor, and writes O to the rows of a contiguous tensor. The factors are in
/// shared memory.
///
/// If a row's factor is 0, the function writes zeros, because the row's accumulators may contain NaN. The caller must
/// sync the cube after the last write to shared memory and before the call.
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
            Stage::Units(_) => panic!("expected a stage in fragments"),
        },
    }
}
