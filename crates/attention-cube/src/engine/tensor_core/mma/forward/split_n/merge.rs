//! The merge of the outputs of the key groups. A key group is one or two warps that process the same blocks of keys (see
//! `split_n.rs`).
//!
//! Each key group has an output and a row sum for every row. Both are relative to the group's own row maximum, which
//! the softmax has subtracted from the scores. The merge rescales outputs and sums to the largest row maximum of all
//! groups, as split-KV does. Each warp adds the outputs of all groups for some of the columns, in a fixed order, so
//! results are bitwise equal in every run.

use super::stages::Roles;
use crate::engine::tensor_core::common::output::{Finished, STEP_REGISTERS};
use crate::engine::tensor_core::common::softmax::{SoftmaxState, finite, quad_sum};
use crate::engine::tensor_core::mma::forward::warp::{MainloopOutput, WarpStates};
use crate::engine::tensor_core::mma::fragments::{load_row_pair, store_row_pair};
use crate::engine::tensor_core::mma::plan::split_n::MmaSplitNTiles;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::exchange::{FOURS_BYTES, exchange_address, load_registers, store_registers};
use cube_kit::nvidia::accumulator::{Pair, is_second};
use cube_kit::nvidia::ptx::exp2;
use cubecl::prelude::*;

/// The number of bytes in shared memory for 16 columns of an output fragment, in f32.
const STEP_BYTES: usize = STEP_REGISTERS / 4 * FOURS_BYTES;

/// The shared-memory addresses of two tables: the row maxima of the key groups, and their row sums. A key group is one or two
/// warps that process the same keys. A table has one 32-bit word per group and row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Tables {
    pub references: u32,
    pub sums: u32,
}

/// The row maxima and row sums of the thread's two rows, combined over all key groups.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Together {
    reference: Pair,
    sums: Pair,
}

/// Computes the factors that rescale a key group's results from the group's own row maxima to the combined row maxima. A key
/// group is one or two warps that process the same keys.
#[cube]
fn factors(own: Pair, all: Pair, scale_log2: f32, hidden: f32) -> Pair {
    Pair {
        first: exp2((own.first - finite(all.first, hidden)) * scale_log2),
        second: exp2((own.second - finite(all.second, hidden)) * scale_log2),
    }
}

/// Returns the address of a key group's entries in `table`, for the 16 rows of a fragment. The table holds the row
/// maxima, or the row sums, of all key groups. A key group is one or two warps that process the same keys.
#[cube]
fn words(
    table: u32,
    #[comptime] group: usize,
    #[comptime] fragment: usize,
    #[comptime] tiles: MmaSplitNTiles,
) -> u32 {
    table + comptime!((4 * (group * tiles.rows() + fragment * FRAGMENT_ROWS)) as u32)
}

/// Combines the row maxima and row sums of a fragment's rows over all key groups. A key group is one or two warps that
/// process the same keys. Every group must have stored its maxima and sums.
#[cube]
fn together(
    tables: &Tables,
    row: u32,
    scale_log2: f32,
    hidden: f32,
    #[comptime] fragment: usize,
    #[comptime] tiles: MmaSplitNTiles,
) -> Together {
    let mut largest_0 = hidden;
    let mut largest_1 = hidden;
    #[unroll]
    for group in 0..tiles.key_groups {
        let own = load_row_pair(words(tables.references, group, fragment, tiles), row);
        largest_0 = max(largest_0, own.first);
        largest_1 = max(largest_1, own.second);
    }
    let reference = Pair {
        first: largest_0,
        second: largest_1,
    };
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    #[unroll]
    for group in 0..tiles.key_groups {
        let own = load_row_pair(words(tables.references, group, fragment, tiles), row);
        let sums = load_row_pair(words(tables.sums, group, fragment, tiles), row);
        let factor = factors(own, reference, scale_log2, hidden);
        sum_0 += sums.first * factor.first;
        sum_1 += sums.second * factor.second;
    }
    Together {
        reference,
        sums: Pair {
            first: sum_0,
            second: sum_1,
        },
    }
}

/// Rescales a warp's output to the combined row maxima, and stores the output in the shared memory that held the warp's
/// keys and values. Also stores the row maxima and row sums of the warp's key group (the one or two warps that process
/// the same keys).
#[cube]
pub(super) fn store_results<AO: Size>(
    attended: &MainloopOutput<AO>,
    tables: &Tables,
    roles: &Roles,
    scale_log2: f32,
    hidden: f32,
    #[comptime] tiles: MmaSplitNTiles,
) {
    let row = UNIT_POS % 32u32 / 4u32;
    let group_words = roles.key_group * comptime!(4 * tiles.rows() as u32);
    #[unroll]
    for fragment in 0..tiles.fragments {
        let state = state_of(&attended.states, fragment);
        let first = words(group_words, 0usize, fragment, tiles);
        let sums = quad_sum(state.sums);
        if roles.column_group == 0u32 {
            store_row_pair(state.row_max.reference, tables.references + first, row);
            store_row_pair(sums, tables.sums + first, row);
        }
    }
    sync_cube();
    let count = comptime!(tiles.vectors()[5] / tiles.fragments);
    let used = comptime!(STEP_REGISTERS * tiles.warp().steps());
    let mut o = attended.o;
    #[unroll]
    for fragment in 0..tiles.fragments {
        let state = state_of(&attended.states, fragment);
        let all = together(tables, row, scale_log2, hidden, fragment, tiles);
        let factor = factors(state.row_max.reference, all.reference, scale_log2, hidden);
        let sums = quad_sum(state.sums);
        #[unroll]
        for i in 0..used {
            let register = comptime!(fragment * count + i);
            let (own, sum) = if comptime!(is_second(i)) {
                (factor.second, sums.second)
            } else {
                (factor.first, sums.first)
            };
            // Store 0 for a row whose sum is 0. Such a row sees no key, so its P is 0. Its output may nevertheless be
            // NaN, because the GEMM multiplies P by rows of V that may be NaN, and 0 · NaN is NaN.
            let scaled = o.extract(register) * own;
            o.insert(register, select(sum == 0.0f32, 0.0f32, scaled));
        }
        store_registers::<AO>(
            exchange_address(roles.stages)
                + comptime!((fragment * tiles.warp().steps() * STEP_BYTES) as u32),
            o,
            comptime!(fragment * count),
            used,
        );
    }
    sync_cube();
}

#[cube]
fn state_of(states: &WarpStates, #[comptime] fragment: usize) -> SoftmaxState {
    if comptime!(fragment == 0) {
        states.first
    } else {
        states.second
    }
}

/// Adds the outputs of all key groups for some columns of a fragment. A key group is one or two warps that process the
/// same keys. In each key group, one warp has computed a given column. The warps that have computed the same columns,
/// one warp in each key group, divide the additions for these columns among themselves.
#[cube]
pub(super) fn put_together<NO: Size>(
    tables: &Tables,
    roles: &Roles,
    scale_log2: f32,
    hidden: f32,
    #[comptime] fragment: usize,
    #[comptime] tiles: MmaSplitNTiles,
) -> Finished<NO> {
    let row = UNIT_POS % 32u32 / 4u32;
    let all = together(tables, row, scale_log2, hidden, fragment, tiles);
    let group_bytes = comptime!((tiles.column_groups * tiles.warp_bytes()) as u32);
    // All key groups have stored their outputs in shared memory. `first` is the address of the first key group's
    // output, for the columns that this warp has computed.
    let first = exchange_address(roles.stages) - roles.key_group * group_bytes;
    let mut o = Vector::<f32, NO>::zeroed();
    #[unroll]
    for own in 0..tiles.part_steps() {
        let step = roles.first_step + comptime!(own as u32);
        if step < comptime!(tiles.warp().steps() as u32) {
            let at = first
                + comptime!((fragment * tiles.warp().steps() * STEP_BYTES) as u32)
                + step * comptime!(STEP_BYTES as u32);
            let mut sum = Vector::<f32, Const<STEP_REGISTERS>>::zeroed();
            #[unroll]
            for group in 0..tiles.key_groups {
                let offset = comptime!(group as u32) * group_bytes;
                sum += load_registers::<Const<STEP_REGISTERS>>(at + offset, STEP_REGISTERS);
            }
            #[unroll]
            for i in 0..STEP_REGISTERS {
                o.insert(comptime!(own * STEP_REGISTERS + i), sum.extract(i));
            }
        }
    }
    Finished::<NO> {
        o,
        reference: all.reference,
        sums: all.sums,
    }
}
