//! The first product `S = A Bᵀ` in fragments, and the distribution of S to the units.
//!
//! Budget: a plane's fragments of S are in registers, together with the operand fragments of one multiplication. S
//! passes through shared memory once, because a unit cannot know which elements of a fragment it holds. If S divides
//! evenly among the planes, each plane syncs only its own units. Otherwise the whole cube syncs.

use super::super::cmma::{
    LeftFragment, SumFragment, load_left, load_right, multiply, plane_index, store_sum, zero_sums,
};
use super::super::score_layout::tile_row;
use super::super::staged::stage_rows;
use super::super::vec4::Four;
use super::planes::{lane, plane_position, sync_own_plane};
use super::stage::{FragmentStage, depth_rows};
use crate::math::layout::Operand;
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// Computes [`multiply_transposed`](super::super::product::multiply_transposed) on fragments. When the function returns, other
/// units may still be reading S from shared memory.
#[cube]
pub(in crate::tile_ops) fn multiply_transposed<
    E: Numeric,
    B: Numeric,
    C: Float,
    N: Size,
    W: Size,
>(
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
            // Wait until the plane's units have read the scores of the previous multiplication, because the new scores
            // overwrite the previous scores.
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

/// Multiplies those columns of A and B that are in shared memory, and adds the product to the plane's fragments of S.
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
    let place = plane_position(plane_index(tiles), tiles);
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

/// Distributes a plane's scores to the units of this plane, through the plane's own region of shared memory.
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

/// Distributes all scores to the units of the cube, through shared memory.
#[cube]
fn hand_to_cube<C: Float>(
    sums: &Sequence<SumFragment>,
    stage: &mut FragmentStage<C>,
    s: &mut Array<f32>,
    #[comptime] tiles: UnitTiles,
) {
    let [m, n, _] = comptime!(tiles.fragment_shape());
    let across = comptime!(tiles.score_fragments());
    let place = plane_position(plane_index(tiles), tiles);
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
