//! The split-D backward, for head sizes up to 512. The tile's scores with a block are divided among the warps by rows
//! and by columns, and so is the tile's gradient.
//!
//! Tensors. For dQ, the kernel keeps a tile of Q and dO, and streams blocks of K and V. For dK and dV, the kernel keeps a
//! tile of K and V, and streams blocks of Q and dO.
//!
//! - Queries and their gradient `[batch, q_heads, q_len, head_dim]`.
//! - Output gradients `[batch, q_heads, q_len, value_dim]`.
//! - Keys and their gradient `[batch, kv_heads, kv_len, head_dim]`.
//! - Values and their gradient `[batch, kv_heads, kv_len, value_dim]`.
//! - LSE and delta `[batch, q_heads, 5, padded q_len]`, f32. Row 0 of a head holds the LSE, row 1 delta. If every LSE
//!   is stored as two f32, row 0 holds only the row maximum, and row 2 the logarithm of the row sum. Otherwise, a query
//!   is *far* if one f32 cannot hold its LSE precisely enough. For a far query, row 0 holds a marker value, row 2 the
//!   logarithm of the row sum, and row 3 the row maximum. Row 4 holds one flag per group of queries. The flag tells
//!   whether the group has a far query.
//! - Gradients of several splits `[splits · batch, heads, len, dim]`, f32.
//!
//! Budget. The sizes are for head size 512 with 227 KB of shared memory ([`MmaGradientSplitDTiles::shared_memory`]). Shared
//! memory holds each of the tile's two operands in 64 KB, dS in 16 KB, and a ring of 4 slots of 16 KB. A thread uses 128
//! registers for the gradient, 32 for S and 32 for dP.
//!
//! Bound. The bandwidth of shared memory limits the kernel. For dQ or dK, a block of 128 columns takes 9,400 clocks of an
//! H200's tensor core, and 13,300 clocks of its shared memory:
//!
//! - The operand reads for S take 4,100 clocks. Each warp computes only 32 × 32 scores, so several warps read the same
//!   operand rows. The operand reads for dP take another 4,100 clocks.
//! - The operand reads for the gradient GEMM take only 2,000 clocks, since each warp computes 64 × 64 elements.
//! - The writes of the copies take 3,000 clocks.
//!
//! If an operand of the tile does not stay in shared memory, the kernel copies this operand (64 KB) again for each
//! block.
//!
//! Schedule. Each CTA has one tile. All streamed operands pass through one ring of slots in shared memory. The operands
//! of S and dP come in chunks of columns, and the right operand of the gradient GEMM in chunks of rows. All warps copy
//! and multiply. Each slot has a *full* barrier (the copies to the slot have completed) and an *empty* barrier (all
//! warps have read the slot). The copies therefore need no CTA-wide barrier. Each warp scheduler has two warps: one
//! warp can multiply while the second waits, copies, or computes P and dS.
//!
//! For each block, the warps compute S, P, dP and dS, write dS to shared memory, meet at a barrier, and compute the
//! gradient GEMM. If a kernel computes dK and dV, one half of the warps computes dK, and the second half computes dV. P
//! is then stored beside dS.

mod mainloop;
mod p_ds;
mod ring;
mod warp_roles;

use self::mainloop::sum;
use self::ring::{Operands, copy_stationary, passed, stationary_rows};
use self::warp_roles::{Roles, assign_roles};
use super::part::alike;
use crate::engine::tensor_core::common::dropout::{times_kept, value_factor};
use crate::engine::tensor_core::common::gradient::p_scale;
use crate::engine::tensor_core::common::output::{OutputPart, without_blind};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::scoring::{GradientGrid, GradientOperands};
use crate::engine::tensor_core::common::stationary_tile::{
    Stationary, first_visit, row_factors, stationary_tile_split, stationary_work_tile,
    write_gradient_rows,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::fragments::fragment_of;
use crate::engine::tensor_core::mma::plan::MmaGradientSplitDTiles;
use crate::engine::tensor_core::mma::ring::make_ring;
use crate::math::side::Side;
use crate::math::visibility::SeqLens;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::nvidia::accumulator::pair;
use cube_kit::nvidia::ptx::shared_address;
use cubecl::prelude::*;

/// The kernel processes the gradient's columns in steps of this number of columns. For each step, a thread holds
/// `STEP_COLUMNS / 2` registers of a 16-row fragment.
const STEP_COLUMNS: usize = 16;
type StepRegisters = Const<{ STEP_COLUMNS / 2 }>;

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is decided at compile time, the inner one at run time"
)]
pub(crate) fn backward_split_d<
    E: Float,
    G: Float,
    F: Float,
    N: Size,
    NB: Size,
    NS: Size,
    NP: Size,
    AS: Size,
    AP: Size,
    AG: Size,
>(
    inputs: GradientOperands<E>,
    scoring: Scoring<F, NB>,
    dot_gradient: &mut Tensor<Vector<G, N>>,
    value_gradient: &mut Tensor<Vector<G, N>>,
    work: GradientGrid,
    #[comptime] tiles: MmaGradientSplitDTiles,
    #[comptime] kind: TileKind,
    #[define(E, G, F)] _elements: [ElemType; 3],
    #[define(N, NB, NS, NP, AS, AP, AG)] _sizes: [usize; 7],
) {
    let masking = &scoring.masking;
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!(tiles.shared_memory() / 4), 1024usize);
    let start = shared_address(&memory);
    if UNIT_POS == 0u32 {
        make_ring(
            start,
            comptime!(tiles.ring()),
            MmaGradientSplitDTiles::UNITS,
            MmaGradientSplitDTiles::WARPS,
        );
    }
    sync_cube();
    let index = CUBE_POS as u32;
    if index < work.grid.cubes {
        let work_tile = stationary_work_tile(&work.grid, index, kind.fragment.side);
        let tile = stationary_tile_split(
            work_tile,
            &work.grid,
            masking,
            work.group,
            tiles.rows,
            tiles.columns,
            kind,
        );
        let tile = alike(tile);
        let roles = assign_roles(tiles);
        let operands = Operands {
            resident_q_or_k: stationary_rows::<E>(&inputs.stationary_qk, &tile, tiles),
            resident_v_or_do: stationary_rows::<E>(&inputs.stationary_v_do, &tile, tiles),
            q_or_k: passed::<E>(&inputs.q_or_k, &tile),
            v_or_do: passed::<E>(&inputs.v_or_do, &tile),
            start,
        };
        let first = first_visit(&tile, masking, kind);
        if first.head < tile.heads {
            copy_stationary(&operands, &tile, tiles);
        }
        let sums = sum::<F, NB, NS, NP, AS, AP, AG>(
            &operands,
            &inputs.lse_delta,
            &tile,
            first,
            &roles,
            &scoring,
            tiles,
            kind,
        );
        if comptime!(tiles.sums.has_q_or_k()) {
            if roles.gradient == 0u32 {
                write_dots::<G, N, AG>(
                    sums,
                    dot_gradient,
                    &inputs.lse_delta,
                    &tile,
                    &roles,
                    &masking.seq_lens,
                    times_kept(scoring.arguments.scale, &scoring.dropout),
                    tiles,
                    kind,
                );
            }
        }
        if comptime!(tiles.sums.has_values()) {
            if roles.gradient == comptime!(tiles.gradients() as u32 - 1) {
                let factor = value_factor(&scoring.dropout, comptime!(p_scale(tiles.half)));
                write_values::<G, N, AG>(sums, value_gradient, &tile, &roles, factor, tiles);
            }
        }
    }
}

/// Writes to global memory the elements of dQ or dK that a warp has computed.
#[cube]
fn write_dots<G: Float, N: Size, AG: Size>(
    sums: Vector<f32, AG>,
    gradient: &mut Tensor<Vector<G, N>>,
    lse_delta: &Tensor<f32>,
    tile: &Stationary,
    roles: &Roles,
    seq_lens: &SeqLens,
    scale: f32,
    #[comptime] tiles: MmaGradientSplitDTiles,
    #[comptime] kind: TileKind,
) {
    #[unroll]
    for fragment in 0..MmaGradientSplitDTiles::SUM_FRAGMENTS {
        let row = row_of(roles, fragment);
        let factors = row_factors(lse_delta, tile, row, seq_lens, scale, kind.fragment);
        #[unroll]
        for step in 0..tiles.steps() {
            let own = step_of::<AG>(sums, fragment, step, tiles);
            let own = if comptime!(tiles.side == Side::Queries) {
                without_blind::<StepRegisters>(own, factors, STEP_COLUMNS)
            } else {
                own
            };
            write_gradient_rows::<G, N, StepRegisters>(
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

/// Writes to global memory the elements of dV that a warp has computed.
#[cube]
fn write_values<G: Float, N: Size, AG: Size>(
    sums: Vector<f32, AG>,
    gradient: &mut Tensor<Vector<G, N>>,
    tile: &Stationary,
    roles: &Roles,
    factor: f32,
    #[comptime] tiles: MmaGradientSplitDTiles,
) {
    #[unroll]
    for fragment in 0..MmaGradientSplitDTiles::SUM_FRAGMENTS {
        #[unroll]
        for step in 0..tiles.steps() {
            write_gradient_rows::<G, N, StepRegisters>(
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

/// Returns the tile row of an element of the warp's `fragment`-th gradient fragment. The element is the one in the
/// thread's first register of this fragment.
#[cube]
fn row_of(roles: &Roles, #[comptime] fragment: usize) -> i32 {
    let first = roles.sum_row + comptime!((fragment * FRAGMENT_ROWS) as u32);
    (first + UNIT_POS % 32u32 / 4u32) as i32
}

/// Extracts the registers of one fragment for the warp's `step`-th group of 16 columns.
#[cube]
fn step_of<AG: Size>(
    sums: Vector<f32, AG>,
    #[comptime] fragment: usize,
    #[comptime] step: usize,
    #[comptime] tiles: MmaGradientSplitDTiles,
) -> Vector<f32, StepRegisters> {
    fragment_of::<AG, StepRegisters>(sums, comptime!(fragment * tiles.steps() + step))
}

/// Returns the first gradient column of the warp's `step`-th group of 16 columns.
#[cube]
fn first_column(
    roles: &Roles,
    #[comptime] step: usize,
    #[comptime] tiles: MmaGradientSplitDTiles,
) -> u32 {
    roles.column_group * comptime!(STEP_COLUMNS as u32)
        + comptime!((STEP_COLUMNS * step * tiles.column_groups()) as u32)
}
