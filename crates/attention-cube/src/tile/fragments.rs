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
use super::product::{Four, Vec4, mark_used, store_scaled, tile_row};
use super::staged::{stage_rows, stage_streamed};
use crate::math::layout::{Operand, Rows, row_offset};
use crate::tile::tiles::UnitTiles;
use cubecl::prelude::*;

/// Bytes at which fragments in shared memory have to start, for the strictest compiler (CUDA's).
const ALIGNMENT: usize = 32;

/// What a cube shares for the products.
#[derive(CubeType)]
pub(crate) struct FragmentStage<C: Float> {
    /// The operands' parts that are multiplied.
    pub operands: Shared<[Four<C>]>,
    /// S, and fragments of O on their way.
    pub sums: Shared<[Vec4]>,
    /// Of each stationary operand, whether it is among the operands already, where it stays.
    is_held: Array<bool>,
}

#[cube]
pub(super) fn new_stage<C: Float>(#[comptime] tiles: UnitTiles) -> FragmentStage<C> {
    let mut is_held = Array::<bool>::new(comptime!(tiles.held().max(1)));
    #[unroll]
    for operand in 0..comptime!(tiles.held().max(1)) {
        is_held[operand] = false;
    }
    FragmentStage::<C> {
        operands: Shared::new_aligned_slice(comptime!(tiles.stage_vectors()), ALIGNMENT),
        sums: Shared::new_aligned_slice(comptime!(tiles.score_vectors()), ALIGNMENT),
        is_held,
    }
}

#[cube]
pub(super) fn new_tile<C: Float>(#[comptime] tiles: UnitTiles) -> Shared<[Four<C>]> {
    Shared::new_aligned_slice(comptime!(tiles.tile_vectors()), ALIGNMENT)
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
    let [m, n, k] = comptime!(tiles.fragment_shape());
    let pitch = comptime!(tiles.depth_pitch());
    let vectors = comptime!(tiles.depth / 4);
    let holds = comptime!(stationary < tiles.held());
    let a_at = comptime!(if stationary < tiles.held() {
        stationary * tiles.stationary_vectors()
    } else {
        0
    });
    let b_at = comptime!(tiles.streamed_at());
    let across = comptime!(tiles.score_fragments());
    let place = place_of_plane(plane_index(tiles), tiles);
    let mut sums = zero_sums(
        comptime!(tiles.row_fragments() * tiles.score_fragments()),
        tiles,
    );
    let chunks = a.rows.columns.div_ceil(comptime!(tiles.depth as u32));
    for chunk in 0..chunks {
        let column = chunk * comptime!(tiles.depth as u32);
        sync_cube();
        let mut is_wanted = true;
        if holds {
            is_wanted = !stage.is_held[stationary];
            stage.is_held[stationary] = true;
        }
        if is_wanted {
            stage_rows(
                a.tensor,
                &a.rows,
                a_first,
                column,
                &mut stage.operands,
                a_at,
                tiles.rows,
                vectors,
                pitch,
                0usize,
                a_packed,
                tiles.units,
            );
        }
        stage_rows(
            b.tensor,
            &b.rows,
            b_first,
            column,
            &mut stage.operands,
            b_at,
            comptime!(tiles.columns()),
            vectors,
            pitch,
            0usize,
            false,
            tiles.units,
        );
        sync_cube();
        for step in 0..comptime!(tiles.depth / k) {
            let at = step * comptime!(k / 4);
            let mut lefts = Sequence::<LeftFragment<C>>::new();
            #[unroll]
            for r in 0..comptime!(tiles.row_fragments()) {
                let row = (place.row + comptime!(r * tiles.plane_rows())) * m;
                lefts.push(load_left(
                    &stage.operands,
                    a_at + at + row * pitch,
                    pitch,
                    tiles,
                ));
            }
            #[unroll]
            for c in 0..across {
                let column = place.column + comptime!(c * tiles.plane_columns());
                let whole = comptime!((c + 1) * tiles.plane_columns() <= tiles.score_columns());
                if whole || column < comptime!(tiles.score_columns()) {
                    let at = b_at + at + column * n * pitch;
                    let right = load_right(&stage.operands, at, pitch, true, tiles);
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

/// See [`accumulate`](super::product::accumulate). Nobody reads the stage when it starts.
#[cube]
pub(super) fn accumulate<E: Numeric, C: Float, N: Size>(
    tile: &Shared<[Four<C>]>,
    b: &Operand<'_, E, N>,
    b_first: i32,
    stage: &mut FragmentStage<C>,
    used: &mut Shared<[u32]>,
    output: &mut Sequence<SumFragment>,
    #[comptime] has_masked: bool,
    #[comptime] tiles: UnitTiles,
) {
    if comptime!(has_masked) {
        mark_used::<C>(tile, used, tiles);
    }
    let [m, n, k] = comptime!(tiles.fragment_shape());
    let fragments = comptime!(tiles.fragment_tiles());
    let chunks = comptime!(tiles.columns() / tiles.streamed_rows);
    let parts = comptime!(fragments.output_fragments / fragments.staged_fragments);
    let tile_pitch = comptime!(tiles.tile_pitch());
    let pitch = comptime!(tiles.staged_pitch());
    let place = place_of_plane(plane_index(tiles), tiles);
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
            for step in 0..comptime!(tiles.streamed_rows / k) {
                let at = chunk_row / 4 + step * comptime!(k / 4);
                let mut lefts = Sequence::<LeftFragment<C>>::new();
                #[unroll]
                for r in 0..comptime!(tiles.row_fragments()) {
                    let row = (place.row + comptime!(r * tiles.plane_rows())) * m;
                    lefts.push(load_left(tile, at + row * tile_pitch, tile_pitch, tiles));
                }
                #[unroll]
                for c in 0..fragments.staged_fragments {
                    let column = place.column + comptime!(c * tiles.plane_columns());
                    let at = comptime!(tiles.accumulated_at())
                        + step * comptime!(k * pitch)
                        + column * comptime!(n / 4);
                    let right = load_right(&stage.operands, at, pitch, false, tiles);
                    #[unroll]
                    for r in 0..comptime!(tiles.row_fragments()) {
                        let index = comptime!(
                            r * fragments.output_fragments + part * fragments.staged_fragments + c
                        );
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
            if comptime!(chunks * parts > 1) {
                sync_cube();
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
