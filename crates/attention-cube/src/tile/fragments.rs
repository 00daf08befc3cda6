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
//! where a row has outgrown its reference, a fragment of each plane at a time, and at the end. What bounds it, on a card: the copies to the
//! stage, and waiting for them. Operands that shared memory has room for stay, the stationary ones from block to block, the streamed ones from
//! the first product to the second.

mod output;
mod scores;

pub(super) use self::output::{accumulate, rescale, store_output, zero_output};
pub(super) use self::scores::multiply_transposed;

use super::cmma::{SumFragment, plane_index, zero_sum};
use super::product::{Four, Vec4};
use super::staged::{StagedRows, load_rows, stage_rows, store_rows};
use crate::math::layout::Operand;
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
