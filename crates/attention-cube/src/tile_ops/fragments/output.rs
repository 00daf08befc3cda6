//! The second product `O += P B` in fragments, and the store of O to memory.
//!
//! Budget: a plane's fragments of O stay in registers over all blocks, together with the operand fragments of one
//! multiplication. Shared memory holds only one fragment of O per plane at a time.

use super::super::cmma::{
    LeftFragment, SumFragment, load_left, load_right, load_sum, multiply, plane_index, store_sum,
    zero_sums,
};
use super::super::row_access::store_scaled;
use super::super::staged::stage_streamed;
use super::super::used_columns::mark_used;
use super::super::vec4::{Four, Vec4, zeros};
use super::planes::plane_position;
use super::stage::FragmentStage;
use crate::math::layout::{Operand, Rows, row_offset};
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// Returns the plane's fragments of O, filled with zeros. Positions in O are counted in fragments. The fragment at
/// index `r · output_fragments + c` lies `r · plane_rows` rows below and `c · plane_columns` columns to the right of
/// the plane's first fragment.
#[cube]
pub(in crate::tile_ops) fn zero_output(#[comptime] tiles: UnitTiles) -> Sequence<SumFragment> {
    zero_sums(
        comptime!(tiles.row_fragments() * tiles.fragment_tiles().output_fragments),
        tiles,
    )
}

/// Computes [`accumulate`](super::super::product::accumulate) on fragments.
///
/// The caller must sync the cube before the call. If the function copies `b` to shared memory, the copy overwrites the
/// previous operands, so all units must have finished reading them. If `b` is already in shared memory, the tile P must
/// be visible to all units.
#[cube]
pub(in crate::tile_ops) fn accumulate<E: Numeric, C: Float, N: Size>(
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

/// Zeroes rows of the streamed operand B in shared memory. A row of B is zeroed if the matching column of P is all
/// zero, because the row may contain NaN. The function syncs the cube at its end.
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

/// Multiplies `rows` columns of P by the matching rows of B, and adds the product to fragments of O. The columns of P
/// start at vector `tile_at`. A plane numbers its fragments in each row of fragments of O from 0. In each row of
/// fragments, the plane updates `count` fragments, beginning with number `first_fragment`.
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
    let place = plane_position(plane_index(tiles), tiles);
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

/// Multiplies each row of O by the row's factor. `moved` has one flag per group of rows, which tells whether any row
/// maximum of the group has changed. If no flag is set, the function leaves O unchanged. Otherwise O passes through
/// shared memory.
///
/// The function syncs the cube before it reads `moved`. All units must have read S before the call, because the
/// fragments of O overwrite S in shared memory.
#[cube]
pub(in crate::tile_ops) fn rescale<C: Float>(
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
                        let place = plane_position(at / vectors, tiles);
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

/// Computes [`store_output`](super::super::product::store_output) on fragments. When the function returns, no unit reads
/// shared memory any more.
#[cube]
pub(in crate::tile_ops) fn store_output<E: Float, C: Float, N: Size>(
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
                let place = plane_position(at / vectors, tiles);
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
