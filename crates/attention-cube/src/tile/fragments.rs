//! The tile products by fragments: S = A Bᵀ, and O += P B, on the device's matrix units, opaque as they are.
//!
//! Budget. A stage of the operands and P, in the operands' own element; S in f32; registers a unit: `4 · rows_per_unit` of S, and of O
//! `rows · output columns / units`. Planes have fragments in turns, so that each has rows of its own as far as there are enough:
//!
//! | product | a plane loads a step of `k` | and multiplies |
//! |---|---|---|
//! | [`multiply_transposed`] | `row_fragments + score_fragments` fragments | their product |
//! | [`accumulate`] | `row_fragments + output_fragments` | their product |
//!
//! No unit knows which elements of a fragment it holds, so S goes through shared memory on its way to the softmax, P on its way back, and O
//! where a row has outgrown its reference, a fragment of each plane at a time, and at the end. Barriers are the cube's: not every
//! device has a plane's. What bounds it, on a card: the copies to the stage. Where shared memory holds all
//! columns of the stationary rows they stay; else they are copied again for every block.

use super::cmma::{
    LeftFragment, SumFragment, load_left, load_right, load_sum, multiply, plane_index, store_sum,
    zero_sum,
};
use super::product::{Four, Vec4, mark_used, store_scaled, tile_row, zeros};
use super::staged::{StagedRows, load_rows, stage_rows, stage_streamed, store_rows};
use crate::math::layout::{Operand, Rows, row_offset};
use crate::tile::tiles::UnitTiles;
use cubecl::prelude::*;

/// Bytes at which fragments in shared memory have to start, for the strictest compiler (CUDA's).
const ALIGNMENT: usize = 32;

/// Vectors that a unit has on their way at a time where both streamed operands are copied at once, at most.
const AHEAD: usize = 16;

/// What a cube shares for the products.
#[derive(CubeType)]
pub(crate) struct FragmentStage<C: Float> {
    /// The operands' parts that are multiplied.
    pub operands: Shared<[Four<C>]>,
    /// S, and fragments of O on their way.
    pub sums: Shared<[Vec4]>,
}

#[cube]
pub(super) fn new_stage<C: Float>(#[comptime] tiles: UnitTiles) -> FragmentStage<C> {
    FragmentStage::<C> {
        operands: Shared::new_aligned_slice(comptime!(tiles.stage_vectors()), ALIGNMENT),
        sums: Shared::new_aligned_slice(comptime!(tiles.score_vectors()), ALIGNMENT),
    }
}

#[cube]
pub(super) fn new_tile<C: Float>(#[comptime] tiles: UnitTiles) -> Shared<[Four<C>]> {
    Shared::new_aligned_slice(
        comptime!(tiles.left_tiles() * tiles.tile_vectors()),
        ALIGNMENT,
    )
}

/// Where a plane's fragments are: the first one's row and column, in fragments.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct PlanePlace {
    row: usize,
    column: usize,
}

#[cube]
fn place_of_plane(plane: usize, #[comptime] tiles: UnitTiles) -> PlanePlace {
    PlanePlace {
        row: plane % comptime!(tiles.plane_rows()),
        column: plane / comptime!(tiles.plane_rows()),
    }
}

/// The unit within its plane.
#[cube]
fn lane(#[comptime] tiles: UnitTiles) -> usize {
    let fragments = comptime!(tiles.fragment_tiles());
    if comptime!(fragments.fragments.emulated) {
        UNIT_POS as usize % fragments.plane
    } else {
        UNIT_POS_PLANE as usize
    }
}

/// Waits for the units of the plane.
#[cube]
fn sync_own_plane(#[comptime] tiles: UnitTiles) {
    if comptime!(tiles.fragment_tiles().fragments.emulated) {
        sync_cube();
    } else {
        sync_plane();
    }
}

/// A unit's first row of S where it has those of its own plane.
#[cube]
pub(super) fn unit_row(#[comptime] tiles: UnitTiles) -> usize {
    let [m, n, _] = comptime!(tiles.fragment_shape());
    place_of_plane(plane_index(tiles), tiles).row * m + lane(tiles) / comptime!(n / 4)
}

/// A unit's first vector of columns of S where it has those of its own plane.
#[cube]
pub(super) fn unit_column(#[comptime] tiles: UnitTiles) -> usize {
    let [_, n, _] = comptime!(tiles.fragment_shape());
    place_of_plane(plane_index(tiles), tiles).column * comptime!(n / 4)
        + lane(tiles) % comptime!(n / 4)
}

/// So many zeros.
#[cube]
fn zero_sums(#[comptime] count: usize, #[comptime] tiles: UnitTiles) -> Sequence<SumFragment> {
    let mut sums = Sequence::<SumFragment>::new();
    #[unroll]
    for _ in 0..count {
        sums.push(zero_sum(tiles));
    }
    sums
}

/// A zero O: `[r · output_fragments + c]` of a plane is the fragment `r · plane_rows` below its first one, `c · plane_columns` beside it.
#[cube]
pub(super) fn zero_output(#[comptime] tiles: UnitTiles) -> Sequence<SumFragment> {
    zero_sums(
        comptime!(tiles.row_fragments() * tiles.fragment_tiles().output_fragments),
        tiles,
    )
}

/// Rows of an operand of the first product, `count` of them from the vector `at` of the stage on.
fn depth_rows(at: usize, count: usize, packed: bool, tiles: UnitTiles) -> StagedRows {
    StagedRows {
        at,
        count,
        vectors: tiles.depth / 4,
        pitch: tiles.depth_pitch(),
        interleaved: 0,
        packed,
        units: tiles.units,
    }
}

/// Copies a stationary operand to where it stays. A sync makes it visible.
#[cube]
pub(super) fn hold<E: Numeric, C: Float, N: Size>(
    a: &Operand<'_, E, N>,
    a_first: i32,
    stage: &mut FragmentStage<C>,
    #[comptime] a_packed: bool,
    #[comptime] stationary: usize,
    #[comptime] tiles: UnitTiles,
) {
    stage_rows(
        a.tensor,
        &a.rows,
        a_first,
        0u32,
        &mut stage.operands,
        comptime!(depth_rows(
            stationary * tiles.stationary_vectors(),
            tiles.rows,
            a_packed,
            tiles
        )),
    );
}

/// Copies a block's rows of both streamed operands to where they stay for both products. Reads them before it waits for those that read the
/// last block's, as far as registers hold them, and ends with them being visible to all units.
#[cube]
pub(super) fn stage_block<E: Numeric, C: Float, N: Size>(
    b: &Operand<'_, E, N>,
    other: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut FragmentStage<C>,
    #[comptime] tiles: UnitTiles,
) {
    let rows = comptime!(depth_rows(
        tiles.resident_at(0),
        tiles.columns(),
        false,
        tiles
    ));
    let other_rows = comptime!(depth_rows(
        tiles.resident_at(1),
        tiles.columns(),
        false,
        tiles
    ));
    let steps = comptime!(rows.steps());
    if comptime!(2 * steps <= AHEAD) {
        let loaded = load_rows::<E, C, N>(b.tensor, &b.rows, b_first, 0u32, 0usize, steps, rows);
        let other_loaded = load_rows::<E, C, N>(
            other.tensor,
            &other.rows,
            b_first,
            0u32,
            0usize,
            steps,
            other_rows,
        );
        sync_cube();
        store_rows(&loaded, &mut stage.operands, 0usize, steps, rows);
        store_rows(
            &other_loaded,
            &mut stage.operands,
            0usize,
            steps,
            other_rows,
        );
    } else {
        sync_cube();
        stage_rows(b.tensor, &b.rows, b_first, 0u32, &mut stage.operands, rows);
        stage_rows(
            other.tensor,
            &other.rows,
            b_first,
            0u32,
            &mut stage.operands,
            other_rows,
        );
    }
    sync_cube();
}

/// See [`multiply_transposed`](super::product::multiply_transposed). Ends with S being read.
#[cube]
pub(super) fn multiply_transposed<E: Numeric, B: Numeric, C: Float, N: Size, W: Size>(
    a: &Operand<'_, E, N>,
    a_first: i32,
    b: &Operand<'_, B, W>,
    b_first: i32,
    stage: &mut FragmentStage<C>,
    s: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
    #[comptime] a_packed: bool,
    #[comptime] stationary: usize,
) {
    let holds = comptime!(stationary < tiles.held());
    let a_at = comptime!(if stationary < tiles.held() {
        stationary * tiles.stationary_vectors()
    } else {
        0
    });
    let mut sums = zero_sums(
        comptime!(tiles.row_fragments() * tiles.score_fragments()),
        tiles,
    );
    if comptime!(tiles.is_resident()) {
        let b_at = comptime!(tiles.resident_at(stationary));
        multiply_depth(&stage.operands, &mut sums, a_at, b_at, tiles);
    } else {
        let b_at = comptime!(tiles.streamed_at());
        let chunks = a.rows.columns.div_ceil(comptime!(tiles.depth as u32));
        for chunk in 0..chunks {
            let column = chunk * comptime!(tiles.depth as u32);
            sync_cube();
            if !holds {
                stage_rows(
                    a.tensor,
                    &a.rows,
                    a_first,
                    column,
                    &mut stage.operands,
                    comptime!(depth_rows(0, tiles.rows, a_packed, tiles)),
                );
            }
            stage_rows(
                b.tensor,
                &b.rows,
                b_first,
                column,
                &mut stage.operands,
                comptime!(depth_rows(
                    tiles.streamed_at(),
                    tiles.columns(),
                    false,
                    tiles
                )),
            );
            sync_cube();
            multiply_depth(&stage.operands, &mut sums, a_at, b_at, tiles);
        }
    }
    if comptime!(tiles.owns_scores()) {
        if comptime!(stationary > 0 && tiles.is_resident()) {
            // The first product's sums are read from the same place.
            sync_own_plane(tiles);
        }
        hand_to_plane(&sums, stage, s, tiles);
    } else {
        if comptime!(stationary > 0 && tiles.is_resident()) {
            sync_cube();
        }
        hand_to_cube(&sums, stage, s, tiles);
    }
}

/// Adds the products of the operands' columns in the stage.
#[cube]
fn multiply_depth<C: Float>(
    operands: &Shared<[Four<C>]>,
    sums: &mut Sequence<SumFragment>,
    #[comptime] a_at: usize,
    #[comptime] b_at: usize,
    #[comptime] tiles: UnitTiles,
) {
    let [m, n, k] = comptime!(tiles.fragment_shape());
    let pitch = comptime!(tiles.depth_pitch());
    let across = comptime!(tiles.score_fragments());
    let place = place_of_plane(plane_index(tiles), tiles);
    for step in 0..comptime!(tiles.depth / k) {
        let at = step * comptime!(k / 4);
        let mut lefts = Sequence::<LeftFragment<C>>::new();
        #[unroll]
        for r in 0..comptime!(tiles.row_fragments()) {
            let row = (place.row + comptime!(r * tiles.plane_rows())) * m;
            lefts.push(load_left(operands, a_at + at + row * pitch, pitch, tiles));
        }
        #[unroll]
        for c in 0..across {
            let column = place.column + comptime!(c * tiles.plane_columns());
            let whole = comptime!((c + 1) * tiles.plane_columns() <= tiles.score_columns());
            if whole || column < comptime!(tiles.score_columns()) {
                let at = b_at + at + column * n * pitch;
                let right = load_right(operands, at, pitch, true, tiles);
                #[unroll]
                for r in 0..comptime!(tiles.row_fragments()) {
                    multiply(
                        lefts.index(r),
                        &right,
                        sums.index_mut(comptime!(r * across + c)),
                        true,
                        tiles,
                    );
                }
            }
        }
    }
}

/// Gives the units of a plane the plane's scores, by way of a place in shared memory that is the plane's own.
#[cube]
fn hand_to_plane<C: Float>(
    sums: &Sequence<SumFragment>,
    stage: &mut FragmentStage<C>,
    s: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
) {
    let [_, n, _] = comptime!(tiles.fragment_shape());
    let across = comptime!(tiles.score_fragments());
    let count = comptime!(tiles.row_fragments() * tiles.score_fragments());
    let own = plane_index(tiles) * comptime!(count * tiles.fragment_vectors());
    #[unroll]
    for index in 0..count {
        store_sum(
            sums.index(index),
            &mut stage.sums,
            own + comptime!(index * tiles.fragment_vectors()),
            comptime!(n / 4),
            tiles,
        );
    }
    sync_own_plane(tiles);
    let first = own + lane(tiles);
    let each = comptime!(tiles.vectors_of_fragment());
    #[unroll]
    for k in 0..comptime!(tiles.rows_per_unit()) {
        #[unroll]
        for c in 0..across {
            let index = comptime!(k / each * across + c);
            let within = comptime!(
                index * tiles.fragment_vectors() + k % each * tiles.fragment_tiles().plane
            );
            let values = stage.sums[first + within];
            #[unroll]
            for lane in 0..4usize {
                s[comptime!((k * across + c) * 4 + lane)] = values.extract(lane);
            }
        }
    }
}

/// Gives the units of a cube the scores, whichever plane multiplied them.
#[cube]
fn hand_to_cube<C: Float>(
    sums: &Sequence<SumFragment>,
    stage: &mut FragmentStage<C>,
    s: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
) {
    let [m, n, _] = comptime!(tiles.fragment_shape());
    let across = comptime!(tiles.score_fragments());
    let place = place_of_plane(plane_index(tiles), tiles);
    #[unroll]
    for r in 0..comptime!(tiles.row_fragments()) {
        #[unroll]
        for c in 0..across {
            let column = place.column + comptime!(c * tiles.plane_columns());
            let whole = comptime!((c + 1) * tiles.plane_columns() <= tiles.score_columns());
            if whole || column < comptime!(tiles.score_columns()) {
                let row = (place.row + comptime!(r * tiles.plane_rows())) * m;
                let score_pitch = comptime!(tiles.score_pitch());
                store_sum(
                    sums.index(comptime!(r * across + c)),
                    &mut stage.sums,
                    row * score_pitch + column * comptime!(n / 4),
                    score_pitch,
                    tiles,
                );
            }
        }
    }
    sync_cube();
    let unit_row = UNIT_POS as usize / comptime!(tiles.column_units);
    let unit_column = UNIT_POS as usize % comptime!(tiles.column_units);
    #[unroll]
    for r in 0..comptime!(tiles.rows_per_unit()) {
        let row = tile_row(unit_row, r, tiles);
        let values = stage.sums[row * comptime!(tiles.score_pitch()) + unit_column];
        #[unroll]
        for c in 0..4usize {
            s[comptime!(4 * r + c)] = values.extract(c);
        }
    }
}

/// See [`accumulate`](super::product::accumulate). Nobody reads the stage when it starts, or where both streamed operands are there, the tile is
/// visible to all units.
#[cube]
pub(super) fn accumulate<E: Numeric, C: Float, N: Size>(
    tile: &Shared<[Four<C>]>,
    b: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut FragmentStage<C>,
    used: &mut Shared<[u32]>,
    output: &mut Sequence<SumFragment>,
    #[comptime] streamed: usize,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    let tile_at = comptime!(tiles.left_tile_at(streamed));
    if comptime!(has_masked) {
        mark_used::<C>(tile, tile_at, used, tiles);
    }
    if comptime!(tiles.is_resident() || (tiles.keeps_last() && streamed == 1)) {
        let at = comptime!(if tiles.is_resident() {
            tiles.resident_at(streamed)
        } else {
            tiles.streamed_at()
        });
        if comptime!(has_masked) {
            clear_unused(&mut stage.operands, &*used, at, tiles);
        }
        multiply_rows(
            tile,
            tile_at.runtime(),
            &stage.operands,
            output,
            at,
            comptime!(tiles.depth_pitch()),
            comptime!(tiles.columns()),
            0usize,
            comptime!(tiles.fragment_tiles().output_fragments),
            tiles,
        );
    } else {
        let fragments = comptime!(tiles.fragment_tiles());
        let chunks = comptime!(tiles.columns() / tiles.streamed_rows);
        let parts = comptime!(fragments.output_fragments / fragments.staged_fragments);
        for chunk in 0..chunks {
            let chunk_row = chunk * tiles.streamed_rows;
            #[unroll]
            for part in 0..parts {
                let first_vector = comptime!(part * tiles.staged_width());
                stage_streamed(
                    b,
                    b_first,
                    chunk_row,
                    first_vector,
                    &mut stage.operands,
                    comptime!(tiles.accumulated_at()),
                    &*used,
                    has_masked,
                    tiles,
                );
                sync_cube();
                multiply_rows(
                    tile,
                    tile_at + chunk_row / 4,
                    &stage.operands,
                    output,
                    comptime!(tiles.accumulated_at()),
                    comptime!(tiles.staged_pitch()),
                    tiles.streamed_rows,
                    comptime!(part * fragments.staged_fragments),
                    fragments.staged_fragments,
                    tiles,
                );
                if comptime!(chunks * parts > 1) {
                    sync_cube();
                }
            }
        }
    }
}

/// Zeros instead of the rows of a streamed operand that nothing but zeros meet. Ends with a sync.
#[cube]
fn clear_unused<C: Float>(
    operands: &mut Shared<[Four<C>]>,
    used: &Shared<[u32]>,
    #[comptime] at: usize,
    #[comptime] tiles: UnitTiles,
) {
    let vectors = comptime!(tiles.depth / 4);
    let total = comptime!(tiles.columns() * tiles.depth / 4);
    #[unroll]
    for step in 0..comptime!(total.div_ceil(tiles.units)) {
        let index = UNIT_POS as usize + comptime!(step * tiles.units);
        let row = min(index / vectors, comptime!(tiles.columns() - 1));
        if index < total && used[row] == 0u32 {
            operands[at + row * comptime!(tiles.depth_pitch()) + index % vectors] = zeros::<C>();
        }
    }
    sync_cube();
}

/// Adds the products of a tile, from the vector `tile_at` of its rows on, and `rows` staged rows to `count` of a plane's fragments side by side.
#[cube]
fn multiply_rows<C: Float>(
    tile: &Shared<[Four<C>]>,
    tile_at: usize,
    operands: &Shared<[Four<C>]>,
    output: &mut Sequence<SumFragment>,
    #[comptime] at: usize,
    #[comptime] pitch: usize,
    #[comptime] rows: usize,
    #[comptime] first_fragment: usize,
    #[comptime] count: usize,
    #[comptime] tiles: UnitTiles,
) {
    let [m, n, k] = comptime!(tiles.fragment_shape());
    let tile_pitch = comptime!(tiles.tile_pitch());
    let place = place_of_plane(plane_index(tiles), tiles);
    for step in 0..comptime!(rows / k) {
        let left_at = tile_at + step * comptime!(k / 4);
        let mut lefts = Sequence::<LeftFragment<C>>::new();
        #[unroll]
        for r in 0..comptime!(tiles.row_fragments()) {
            let row = (place.row + comptime!(r * tiles.plane_rows())) * m;
            lefts.push(load_left(
                tile,
                left_at + row * tile_pitch,
                tile_pitch,
                tiles,
            ));
        }
        #[unroll]
        for c in 0..count {
            let column = place.column + comptime!(c * tiles.plane_columns());
            let right_at = at + step * comptime!(k * pitch) + column * comptime!(n / 4);
            let right = load_right(operands, right_at, pitch, false, tiles);
            #[unroll]
            for r in 0..comptime!(tiles.row_fragments()) {
                let index =
                    comptime!(r * tiles.fragment_tiles().output_fragments + first_fragment + c);
                multiply(
                    lefts.index(r),
                    &right,
                    output.index_mut(index),
                    false,
                    tiles,
                );
            }
        }
    }
}

/// Multiplies the rows of O that have outgrown their references by their factors, by way of shared memory, if there are any. Starts
/// before the factors' `moved` are visible to all units, and after S was read.
#[cube]
pub(crate) fn rescale<C: Float>(
    output: &mut Sequence<SumFragment>,
    factors: &Shared<[f32]>,
    moved: &Shared<[u32]>,
    stage: &mut FragmentStage<C>,
    #[comptime] tiles: UnitTiles,
) {
    sync_cube();
    let mut any = 0u32;
    #[unroll]
    for group in 0..comptime!(tiles.row_groups()) {
        any |= moved[group];
    }
    if any != 0u32 {
        let [m, n, _] = comptime!(tiles.fragment_shape());
        let vectors = comptime!(tiles.fragment_vectors());
        let own = plane_index(tiles) * vectors;
        #[unroll]
        for r in 0..comptime!(tiles.row_fragments()) {
            #[unroll]
            for c in 0..comptime!(tiles.fragment_tiles().output_fragments) {
                let index = comptime!(r * tiles.fragment_tiles().output_fragments + c);
                store_sum(
                    output.index(index),
                    &mut stage.sums,
                    own,
                    comptime!(n / 4),
                    tiles,
                );
                sync_cube();
                #[unroll]
                for step in 0..comptime!((tiles.planes() * vectors).div_ceil(tiles.units)) {
                    let at = UNIT_POS as usize + step * tiles.units;
                    if at < comptime!(tiles.planes() * vectors) {
                        let place = place_of_plane(at / vectors, tiles);
                        let row = (place.row + comptime!(r * tiles.plane_rows())) * m
                            + at % vectors / comptime!(n / 4);
                        stage.sums[at] *= Vec4::cast_from(factors[row]);
                    }
                }
                sync_cube();
                load_sum(
                    output.index_mut(index),
                    &stage.sums,
                    own,
                    comptime!(n / 4),
                    tiles,
                );
                sync_cube();
            }
        }
    }
}

/// See [`store_output`](super::product::store_output): a fragment of each plane at a time. Ends with nothing being read.
#[cube]
pub(super) fn store_output<E: Float, C: Float, N: Size>(
    output: &Sequence<SumFragment>,
    factors: &Shared<[f32]>,
    stage: &mut FragmentStage<C>,
    target: &mut Tensor<Vector<E, N>>,
    rows: &Rows,
    first_row: i32,
    #[comptime] packed: bool,
    #[comptime] tiles: UnitTiles,
) {
    let [m, n, _] = comptime!(tiles.fragment_shape());
    let vectors = comptime!(tiles.fragment_vectors());
    let own = plane_index(tiles) * vectors;
    #[unroll]
    for r in 0..comptime!(tiles.row_fragments()) {
        #[unroll]
        for c in 0..comptime!(tiles.fragment_tiles().output_fragments) {
            let index = comptime!(r * tiles.fragment_tiles().output_fragments + c);
            store_sum(
                output.index(index),
                &mut stage.sums,
                own,
                comptime!(n / 4),
                tiles,
            );
            sync_cube();
            #[unroll]
            for step in 0..comptime!((tiles.planes() * vectors).div_ceil(tiles.units)) {
                let at = UNIT_POS as usize + step * tiles.units;
                let place = place_of_plane(at / vectors, tiles);
                let within = at % vectors;
                let tile_row =
                    (place.row + comptime!(r * tiles.plane_rows())) * m + within / comptime!(n / 4);
                let row = first_row + tile_row as i32;
                if at < comptime!(tiles.planes() * vectors) && row < rows.end {
                    let column = (place.column + comptime!(c * tiles.plane_columns())) * n
                        + within % comptime!(n / 4) * 4;
                    let offset = row_offset(rows, row as u32, packed);
                    store_scaled(
                        stage.sums[at],
                        factors[tile_row],
                        target,
                        rows,
                        offset,
                        column,
                    );
                }
            }
            sync_cube();
        }
    }
}
