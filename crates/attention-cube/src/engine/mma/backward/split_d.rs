//! The backward for heads up to 512 wide: a block's scores are divided among the warps by rows and columns, and the tile's gradient by
//! columns.
//!
//! Budget. Shared memory ([`GradientSplitDTiles::shared_memory`]), at head size 512 with 227 KB: dots and values of the tile 64 KB
//! each, dS of a block 16 KB, a ring of 4 × 16 KB. Registers a thread: 128 of the gradient, 32 of S, 32 of dP. A block of 128
//! columns for dQ or dK takes an H200's matrix unit 9,400 clocks, and the shared memory 13,300: 4,100 for the operands of each of S and
//! dP, 32 × 32 a warp, 2,000 for those of the gradient, 64 × 64 a warp, and 3,000 for what the copies write. That is the bound. Where
//! a tile's own rows do not stay, they are copied again for each block, 64 KB of dots and of values.
//!
//! Schedule. A cube a tile. Dots and values come in chunks of columns, and then the operand of the last product in chunks of rows, through
//! one ring. All warps copy and multiply; barriers tell of each slot whether it is full and whether it is empty, so that two warps of a
//! scheduler drift apart, and one multiplies while another waits, copies, or makes weights. S, its weights, dP, dS, which goes to
//! shared memory; there all meet, once a block; then the sum. Where the gradients of keys and values are summed together, one
//! half of the warps has the one, and the other half the other.

mod pass;
mod ring;
mod roles;
mod weights;

use self::pass::sum;
use self::ring::{Operands, copy_held, held_rows, passed};
use self::roles::{Roles, warp_roles};
use super::part::alike;
use crate::engine::mma::fragments::fragment_of;
use crate::engine::mma::plan::GradientSplitDTiles;
use crate::engine::mma::ring::make_ring;
use crate::fragment::gradient::p_scale;
use crate::fragment::output::{OutputPart, without_blind};
use crate::fragment::scoring::scoring;
use crate::fragment::stationary::{
    Stationary, first_visit, held, row_factors, stationary_work_tile, write_gradient_rows,
};
use crate::fragment::work_tile::TileKind;
use crate::math::schedule::Grid;
use crate::math::score::ScoreArguments;
use crate::math::side::Side;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::hopper::accumulator::pair;
use cube_kit::hopper::ptx::shared_address;
use cubecl::prelude::*;

/// Columns of a step of a gradient, and their registers of a fragment.
const STEP_COLUMNS: usize = 16;
type StepRegisters = Const<{ STEP_COLUMNS / 2 }>;

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(crate) fn backward_split_d<
    E: Float,
    F: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NP: Size,
    AS: Size,
    AP: Size,
    AG: Size,
>(
    stationary_dots: &Tensor<E>,
    stationary_values: &Tensor<E>,
    dots: &Tensor<E>,
    values: &Tensor<E>,
    terms: &Tensor<f32>,
    mask: ComptimeOption<&Tensor<u32>>,
    bias: ComptimeOption<&Tensor<Vector<F, NB>>>,
    lengths_and_ids: ComptimeOption<&Tensor<i32>>,
    dot_gradient: &mut Tensor<Vector<E, N>>,
    value_gradient: &mut Tensor<Vector<E, N>>,
    grid: Grid,
    extent: Extent,
    arguments: ScoreArguments,
    mask_places: MaskPlaces,
    group: u32,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: TileKind,
    #[define(E)] _element: ElemType,
    #[define(F)] _bias_element: ElemType,
    #[define(N)] _vector: usize,
    #[define(NB)] _bias_vector: usize,
    #[define(NS, NP, AS, AP, AG)] _vectors: [usize; 5],
) {
    let scoring = scoring::<F, NB>(extent, lengths_and_ids, mask, mask_places, bias, arguments);
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
    if UNIT_POS == 0u32 {
        make_ring(
            start,
            comptime!(tiles.ring()),
            GradientSplitDTiles::UNITS,
            GradientSplitDTiles::WARPS,
        );
    }
    sync_cube();
    let index = CUBE_POS as u32;
    if index < grid.cubes {
        let work_tile = stationary_work_tile(&grid, index, kind.fragment.side);
        let tile = held(work_tile, masking, group, tiles.rows, tiles.columns, kind);
        let tile = alike(tile);
        let roles = warp_roles(tiles);
        let operands = Operands {
            held_dots: held_rows::<E>(stationary_dots, &tile, tiles),
            held_values: held_rows::<E>(stationary_values, &tile, tiles),
            dots: passed::<E>(dots, &tile),
            values: passed::<E>(values, &tile),
            start,
        };
        let first = first_visit(&tile, masking, kind);
        if first.head < tile.heads {
            copy_held(&operands, &tile, tiles);
        }
        let sums = sum::<F, NB, NS, NP, AS, AP, AG>(
            &operands, terms, &tile, first, &roles, &scoring, tiles, kind,
        );
        if comptime!(tiles.sums.has_dots()) {
            if roles.gradient == 0u32 {
                write_dots::<E, N, AG>(
                    sums,
                    dot_gradient,
                    terms,
                    &tile,
                    &roles,
                    &masking.extent,
                    arguments.scale,
                    tiles,
                    kind,
                );
            }
        }
        if comptime!(tiles.sums.has_values()) {
            if roles.gradient == comptime!(tiles.gradients() as u32 - 1) {
                write_values::<E, N, AG>(sums, value_gradient, &tile, &roles, tiles);
            }
        }
    }
}

/// Writes a warp's part of the gradient of queries or keys.
#[cube]
fn write_dots<E: Float, N: Size, AG: Size>(
    sums: Vector<f32, AG>,
    gradient: &mut Tensor<Vector<E, N>>,
    terms: &Tensor<f32>,
    tile: &Stationary,
    roles: &Roles,
    extent: &Extent,
    scale: f32,
    #[comptime] tiles: GradientSplitDTiles,
    #[comptime] kind: TileKind,
) {
    #[unroll]
    for fragment in 0..GradientSplitDTiles::SUM_FRAGMENTS {
        let row = row_of(roles, fragment);
        let factors = row_factors(terms, tile, row, extent, scale, kind.fragment);
        #[unroll]
        for step in 0..tiles.steps() {
            let own = step_of::<AG>(sums, fragment, step, tiles);
            let own = if comptime!(tiles.side == Side::Queries) {
                without_blind::<StepRegisters>(own, factors, STEP_COLUMNS)
            } else {
                own
            };
            write_gradient_rows::<E, N, StepRegisters>(
                OutputPart::<StepRegisters> { o: own, factors },
                gradient,
                tile,
                row,
                first_column(roles, step, tiles),
                STEP_COLUMNS,
                tiles.head_dim,
            );
        }
    }
}

/// Writes a warp's part of the gradient of values.
#[cube]
fn write_values<E: Float, N: Size, AG: Size>(
    sums: Vector<f32, AG>,
    gradient: &mut Tensor<Vector<E, N>>,
    tile: &Stationary,
    roles: &Roles,
    #[comptime] tiles: GradientSplitDTiles,
) {
    let factor = f32::new(comptime!(1.0 / p_scale(tiles.half)));
    #[unroll]
    for fragment in 0..GradientSplitDTiles::SUM_FRAGMENTS {
        #[unroll]
        for step in 0..tiles.steps() {
            write_gradient_rows::<E, N, StepRegisters>(
                OutputPart::<StepRegisters> {
                    o: step_of::<AG>(sums, fragment, step, tiles),
                    factors: pair(factor, factor),
                },
                gradient,
                tile,
                row_of(roles, fragment),
                first_column(roles, step, tiles),
                STEP_COLUMNS,
                tiles.value_dim,
            );
        }
    }
}

/// The row of a thread's first registers of a fragment, in the tile.
#[cube]
fn row_of(roles: &Roles, #[comptime] fragment: usize) -> i32 {
    let first = roles.sum_row + comptime!((fragment * FRAGMENT_ROWS) as u32);
    (first + UNIT_POS % 32u32 / 4u32) as i32
}

/// A fragment's registers of a warp's `step`-th 16 columns.
#[cube]
fn step_of<AG: Size>(
    sums: Vector<f32, AG>,
    #[comptime] fragment: usize,
    #[comptime] step: usize,
    #[comptime] tiles: GradientSplitDTiles,
) -> Vector<f32, StepRegisters> {
    fragment_of::<AG, StepRegisters>(sums, comptime!(fragment * tiles.steps() + step))
}

/// The first of a warp's `step`-th 16 columns.
#[cube]
fn first_column(
    roles: &Roles,
    #[comptime] step: usize,
    #[comptime] tiles: GradientSplitDTiles,
) -> u32 {
    roles.column_group * comptime!(STEP_COLUMNS as u32)
        + comptime!((STEP_COLUMNS * step * tiles.column_groups()) as u32)
}
