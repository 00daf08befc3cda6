//! Tile multiplications by units. The units read their operands from shared memory. The header of `product.rs` gives
//! the costs.

use super::row_access::load_four;
use super::vec4::{Four, Vec4, zeros};
use crate::math::layout::{Operand, Rows, row_offset};
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// The number of columns per chunk of a dot product. Units first sum the products of each chunk, and then add the sums
/// of the chunks. Without chunks, a sum over 512 columns would lose two more bits. In the backward pass, the difference
/// `dP − delta` would amplify this error.
///
/// All tiles with operands in shared memory add in this order. The scores of the backward pass therefore equal those of
/// the forward pass bit by bit. If a very large score differed in its last bit, the backward pass would compute a wrong
/// probability.
const SUM: usize = 16;

/// The largest number of vectors that a unit loads before it stores them. The unit then waits once for all these loads,
/// and not once for each load.
const IN_FLIGHT: usize = 8;

/// Loads the columns `column` to `column + 3` of a row if `wanted` is true. Otherwise the function returns zeros.
///
/// If `wanted` is false, the function still loads a row that exists, but ignores the row's elements. With a branch
/// instead, compilers would finish each load before the next load begins.
#[cube]
fn load_if<E: Numeric, C: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    row: i32,
    column: u32,
    wanted: bool,
    #[comptime] packed: bool,
) -> Four<C> {
    let offset = row_offset(rows, select(wanted, row as u32, rows.fallback), packed);
    let mut values = load_four::<E, C, N>(source, rows, offset, column);
    if !wanted {
        values = zeros::<C>();
    }
    values
}

/// The row and the position in the row of one vector that a unit copies to shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct RowVector {
    row: usize,
    /// The index of the vector within its row.
    vector: usize,
}

/// Returns the vector that a unit copies in iteration `step` of a copy to shared memory. In each iteration, every unit
/// copies one vector, and the vectors of neighboring units are neighbors. A row has `vectors` vectors.
///
/// If one iteration covers whole rows, a unit copies the same columns in every iteration. From one iteration to the
/// next, the unit's row index grows by a constant. The unit therefore computes its base address only once.
#[cube]
fn turn(
    #[comptime] step: usize,
    #[comptime] vectors: usize,
    #[comptime] units: usize,
) -> RowVector {
    if comptime!(units.is_multiple_of(vectors)) {
        RowVector {
            row: UNIT_POS as usize / vectors + comptime!(step * (units / vectors)),
            vector: UNIT_POS as usize % vectors,
        }
    } else {
        let index = UNIT_POS as usize + comptime!(step * units);
        RowVector {
            row: index / vectors,
            vector: index % vectors,
        }
    }
}

/// The rows that a kernel copies to shared memory: their number, and their layout in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct StagedRows {
    /// The offset of the first vector in shared memory.
    pub at: usize,
    /// The number of rows.
    pub count: usize,
    /// The number of vectors per row.
    pub vectors: usize,
    /// The pitch of rows in shared memory, in vectors.
    pub pitch: usize,
    /// The distance, in rows of shared memory, between the four neighboring rows of the right operand B that one unit
    /// reads. The field is 0 if shared memory holds the rows in order.
    ///
    /// If the field is not 0, row `s` of shared memory holds the block's row `(s % interleaved) · 4 + s / interleaved`.
    /// Neighboring units then read neighboring rows of shared memory.
    pub interleaved: usize,
    /// True if the rows of all heads of a GQA group are numbered consecutively, one head after another.
    pub packed: bool,
    pub units: usize,
}

impl StagedRows {
    const fn total(&self) -> usize {
        self.count * self.vectors
    }

    /// Returns the number of vectors that each unit copies.
    pub const fn steps(&self) -> usize {
        self.total().div_ceil(self.units)
    }
}

/// Loads some of the vectors that a unit copies: those with the indices `first..first + many`. The copied rows start at
/// row `first_row`, and their columns start at column `first_column`.
#[cube]
pub(super) fn load_rows<E: Numeric, C: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    first_row: i32,
    first_column: u32,
    #[comptime] first: usize,
    #[comptime] many: usize,
    #[comptime] staged: StagedRows,
) -> Array<Four<C>> {
    let mut loaded = Array::<Four<C>>::new(many);
    #[unroll]
    for ahead in 0..many {
        let turn = turn(comptime!(first + ahead), staged.vectors, staged.units);
        let mut within = turn.row;
        if comptime!(staged.interleaved > 0) {
            within = (turn.row % staged.interleaved) * 4 + turn.row / staged.interleaved;
        }
        let row = first_row + within as i32;
        loaded[ahead] = load_if::<E, C, N>(
            source,
            rows,
            row,
            first_column + (turn.vector * 4) as u32,
            row >= rows.first && row < rows.end,
            staged.packed,
        );
    }
    loaded
}

/// Writes to shared memory the vectors that [`load_rows`] has loaded into registers.
#[cube]
pub(super) fn store_rows<C: Float>(
    loaded: &Array<Four<C>>,
    stage: &mut Shared<[Four<C>]>,
    #[comptime] first: usize,
    #[comptime] many: usize,
    #[comptime] staged: StagedRows,
) {
    #[unroll]
    for ahead in 0..many {
        let turn = turn(comptime!(first + ahead), staged.vectors, staged.units);
        let whole = comptime!((first + ahead + 1) * staged.units <= staged.total());
        if whole || turn.row < staged.count {
            stage[staged.at + turn.row * staged.pitch + turn.vector] = loaded[ahead];
        }
    }
}

/// Copies rows to shared memory. The copied rows start at row `first_row`, and their columns start at column
/// `first_column`.
#[cube]
pub(super) fn stage_rows<E: Numeric, C: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    rows: &Rows,
    first_row: i32,
    first_column: u32,
    stage: &mut Shared<[Four<C>]>,
    #[comptime] staged: StagedRows,
) {
    #[unroll]
    for batch in 0..comptime!(staged.steps().div_ceil(IN_FLIGHT)) {
        let first = comptime!(batch * IN_FLIGHT);
        let many = comptime!(IN_FLIGHT.min(staged.steps() - batch * IN_FLIGHT));
        let loaded =
            load_rows::<E, C, N>(source, rows, first_row, first_column, first, many, staged);
        store_rows(&loaded, stage, first, many, staged);
    }
}

/// Copies rows `chunk_row..chunk_row + streamed_rows` of a block of `b` to `stage[to..]`. Of each row, the function
/// copies `staged_width` vectors, beginning with vector `first_vector`.
///
/// Set `has_masked` if the tile P, the left operand of `O += P B`, may have hidden scores. If a column of P is all
/// zero, the function then copies zeros instead of the matching row of `b`.
#[cube]
pub(super) fn stage_streamed<E: Numeric, C: Float, N: Size>(
    b: &Operand<'_, E, N>,
    b_first: i32,
    chunk_row: usize,
    first_vector: usize,
    stage: &mut Shared<[Four<C>]>,
    #[comptime] to: usize,
    used: &Shared<[u32]>,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    let width = comptime!(tiles.staged_width());
    let pitch = comptime!(tiles.staged_pitch());
    let total = comptime!(tiles.streamed_rows * tiles.staged_width());
    let steps = comptime!(total.div_ceil(tiles.units));
    #[unroll]
    for batch in 0..comptime!(steps.div_ceil(IN_FLIGHT)) {
        let first = comptime!(batch * IN_FLIGHT);
        let many = comptime!(IN_FLIGHT.min(steps - batch * IN_FLIGHT));
        let mut loaded = Array::<Four<C>>::new(many);
        #[unroll]
        for ahead in 0..many {
            let turn = turn(comptime!(first + ahead), width, tiles.units);
            // If a unit's row lies past the chunk's last row, the unit loads the chunk's last row and does not store it.
            let slot = min(turn.row, comptime!(tiles.streamed_rows - 1));
            let row = b_first + (chunk_row + slot) as i32;
            let mut wanted = row >= b.rows.first && row < b.rows.end;
            if comptime!(has_masked) {
                wanted = wanted && used[chunk_row + slot] != 0u32;
            }
            let column = ((first_vector + turn.vector) * 4) as u32;
            loaded[ahead] = load_if::<E, C, N>(b.tensor, &b.rows, row, column, wanted, false);
        }
        #[unroll]
        for ahead in 0..many {
            let turn = turn(comptime!(first + ahead), width, tiles.units);
            let whole = comptime!((first + ahead + 1) * tiles.units <= total);
            if whole || turn.row < tiles.streamed_rows {
                stage[to + turn.row * pitch + turn.vector] = loaded[ahead];
            }
        }
    }
}

/// Computes [`multiply_transposed`](super::product::multiply_transposed) with operands in shared memory. When the function
/// returns, other units may still be reading the operands.
#[cube]
pub(super) fn multiply_transposed<E: Numeric, B: Numeric, N: Size, W: Size>(
    a: &Operand<'_, E, N>,
    a_first: i32,
    b: &Operand<'_, B, W>,
    b_first: i32,
    stage: &mut Shared<[Vec4]>,
    s: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
    #[comptime] a_packed: bool,
) {
    comptime!(assert!(
        tiles.depth.is_multiple_of(SUM),
        "depth must be a multiple of SUM: {tiles:?}"
    ));
    let pitch = comptime!(tiles.depth_pitch());
    let b_at = comptime!(tiles.rows * tiles.depth_pitch());
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
            comptime!(StagedRows {
                at: 0,
                count: tiles.rows,
                vectors: tiles.depth / 4,
                pitch: tiles.depth_pitch(),
                interleaved: 0,
                packed: a_packed,
                units: tiles.units,
            }),
        );
        stage_rows(
            b.tensor,
            &b.rows,
            b_first,
            column,
            stage,
            comptime!(StagedRows {
                at: tiles.rows * tiles.depth_pitch(),
                count: tiles.columns(),
                vectors: tiles.depth / 4,
                pitch: tiles.depth_pitch(),
                interleaved: tiles.column_units,
                packed: false,
                units: tiles.units,
            }),
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

/// Computes [`accumulate`](super::product::accumulate) with operands in shared memory. When the function returns, other
/// units may still be reading the operands.
#[cube]
pub(super) fn accumulate<E: Numeric, N: Size>(
    tile: &Shared<[Vec4]>,
    b: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut Shared<[Vec4]>,
    used: &Shared<[u32]>,
    output: &mut Array<Vec4>,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    let unit_row = UNIT_POS as usize / comptime!(tiles.output_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.output_units);
    let width = comptime!(tiles.staged_width());
    for chunk in 0..comptime!(tiles.columns() / tiles.streamed_rows) {
        let chunk_row = chunk * tiles.streamed_rows;
        #[unroll]
        for part in 0..comptime!(tiles.output_vectors / tiles.staged_vectors) {
            let first_vector = comptime!(part * tiles.staged_width());
            sync_cube();
            stage_streamed(
                b,
                b_first,
                chunk_row,
                first_vector,
                stage,
                0usize,
                used,
                has_masked,
                tiles,
            );
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
