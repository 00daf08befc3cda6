//! Tile multiplications by planes on matrix units: `S = A Bᵀ` (first product) and `O += P B` (second product). The
//! operands and results are fragments, whose register layout only the device knows.
//!
//! Budget: shared memory holds chunks of the operands A and B, P in the operands' dtype, and S in f32. Per unit, S takes
//! `4 · rows_per_unit` registers, and O takes `rows · output columns / units` registers. In the table, `k` is the depth of
//! one fragment multiplication:
//!
//! | product | fragment loads per plane, for `k` elements of the inner dimension | fragment multiplications per plane, for `k` elements of the inner dimension |
//! |---|---|---|
//! | [`multiply_transposed`] | `row_fragments + score_fragments` | `row_fragments · score_fragments` |
//! | [`accumulate`] | `row_fragments + output_fragments` | `row_fragments · output_fragments` |
//!
//! A unit cannot know which elements of a fragment it holds. S therefore passes through shared memory before the softmax,
//! and P after the softmax. O passes through shared memory at the end, and whenever the softmax rescales O.
//!
//! On a GPU, the copies of operands to shared memory and the waits for these copies limit the speed. Operands therefore stay
//! in shared memory if they fit.

mod output;
pub(super) mod planes;
mod scores;
pub(super) mod stage;

pub(super) use self::output::{accumulate, rescale, store_output, zero_output};
pub(super) use self::scores::multiply_transposed;
pub(super) use self::stage::{new_stage, new_tile};

use self::stage::{FragmentStage, depth_rows};
use super::staged::{load_rows, stage_rows, store_rows};
use crate::math::layout::Operand;
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// The largest number of vectors that a unit loads into registers before it stores them to shared memory.
const AHEAD: usize = 16;

/// Copies a stationary operand (such as Q) to the operand's region of shared memory. The caller must sync the cube
/// before units read the copy.
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

/// Copies a block's rows of both streamed operands (such as K and V) to shared memory. The rows stay in shared memory
/// for both products, `S = A Bᵀ` and `O += P B`.
///
/// If registers suffice, a unit loads the new rows into registers while other units still read the previous block in
/// shared memory. When the function returns, the copy is visible to all units.
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
