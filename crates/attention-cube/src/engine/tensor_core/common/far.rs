//! A query is called *far* if its scores are so large that one f32 cannot hold the query's LSE precisely enough. Only
//! kernels that keep unscaled dot products (`raw` kernels) distinguish far queries.
//!
//! For a query that is not far, the LSE is a single f32. A query is far if the magnitude of its reference (row_max,
//! which the softmax subtracts from the scores) is [`FAR`](crate::auxiliary::delta::kernel::FAR) or more. The rounding
//! of such an LSE to f32 would show in the probabilities. An LSE of 10⁸ has an error of 4, which changes a probability
//! by a factor of 50.
//!
//! For a far query, the LSE tensor holds a mark in place of the LSE. Two other f32 of the tensor hold the query's
//! reference and the logarithm of its row_sum. If a tile may have a far query, all its blocks take the code path for
//! partially visible blocks. That path rounds the scaled dot product as the forward did, so the row's maximum minus the
//! reference is exactly 0. The path subtracts the logarithm afterwards.
//!
//! If the tile holds keys, the blocks that it streams hold queries. The `lse_delta` tensor holds one flag per group of
//! consecutive queries. A flag is set if its group has a far query. A tile of keys may have a far query if a flag of
//! the queries in its blocks is set. In such a tile, the warp votes for each block whether the block holds a far query.
//! Only if the vote finds a far query, the warp reads the two f32 of each far query in the block.
//!
//! Keys whose scaled dot products round to the same f32 get equal probabilities in the backward. The forward
//! distinguishes such keys, since it subtracts dot products before it scales them. A dot product beyond f32's range
//! gives NaN.

use super::gradient::{Logsumexps, LseDelta};
use super::{FragmentKind, RowPair};
use crate::auxiliary::delta::kernel::{FLAGS, LOGARITHM, REFERENCE, ROWS, is_far};
use crate::math::side::Side;
use crate::math::visibility::Keys;
use cube_kit::nvidia::accumulator::{Pair, pair};
use cube_kit::nvidia::ptx::{load_shared_pair, uniform};
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

/// True if one of a warp's queries is far (its LSE needs two f32). For a tile of queries, the warp's queries are its
/// rows. For a tile of keys, the warp's queries are the `columns` columns of the block, and shared memory holds the LSE
/// of these queries.
#[cube]
pub(crate) fn has_far(
    lse_delta: &LseDelta<'_>,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> bool {
    if comptime!(!kind.raw) {
        false.runtime()
    } else if comptime!(kind.side == Side::Queries) {
        lse_delta.may_have_far
    } else {
        let mut has_far = false.runtime();
        if lse_delta.may_have_far {
            let mut far = false.runtime();
            #[unroll]
            for part in 0..comptime!(columns.div_ceil(64)) {
                // A lane without columns of its own checks the last two columns again, so that its load stays inside
                // the block.
                let column = UNIT_POS % 32u32 * 2u32 + comptime!(64 * part as u32);
                let column = min(column, comptime!(columns as u32 - 2));
                let own = load_shared_pair(lse_delta.references_at + 4u32 * column);
                far = far || is_far(own.extract(0usize)) || is_far(own.extract(1usize));
            }
            has_far = plane_any(far);
        }
        has_far
    }
}

/// The number of flags that a lane loads for the first head before the lane waits for any of these loads. Each flag
/// covers 32 queries, so four flags in each of a warp's 32 lanes cover 4,096 queries.
const LOADS: usize = 4;

/// Returns the sum of the flags that this lane loads. A flag is set if one of its `ROWS` queries is *far*, which means
/// that the LSE of the query needs two f32. The lanes of a warp divide the flags of the query heads `first_head` to
/// `first_head + heads − 1` and of the queries in the range `queries`. If the sum is not 0 in some lane of the warp,
/// one of these queries may be far.
///
/// The lane loads the first flags of the first head without a branch, so that the caller's next work overlaps the loads.
///
/// `lse_delta` is `[batch, q_heads, 5, padded q_len]`, and row 4 of a head holds the flags.
#[cube]
pub(crate) fn sum_of_flags(
    lse_delta: &Tensor<f32>,
    batch: u32,
    first_head: u32,
    heads: u32,
    queries: Keys,
    #[comptime] kind: FragmentKind,
) -> f32 {
    let mut sum = 0.0f32;
    if comptime!(kind.raw) {
        let per_flag = comptime!(ROWS as i32);
        let last = lse_delta.stride(2).div_ceil(comptime!(ROWS as usize)) - 1usize;
        let first = (queries.first / per_flag) as usize + (UNIT_POS % 32u32) as usize;
        let end = ((queries.end + per_flag - 1i32) / per_flag) as usize;
        let mut at = batch as usize * lse_delta.stride(0)
            + first_head as usize * lse_delta.stride(1)
            + FLAGS * lse_delta.stride(2);
        #[unroll]
        for load in 0..LOADS {
            // A lane past the end of the range still reads a flag of the head, so that no branch is needed. If this
            // flag is set, the tile takes the slower path of far queries (queries whose LSE needs two f32), even if the
            // tile has no far query.
            sum += lse_delta[at + min(first + 32usize * load, last)];
        }
        let mut flag = first + 32usize * LOADS;
        for _ in 0..heads {
            while flag < end {
                sum += lse_delta[at + min(flag, last)];
                flag += 32usize;
            }
            flag = first;
            at += lse_delta.stride(1);
        }
    }
    sum
}

/// Returns a copy of `lse_delta` with the vote of the warp: `may_have_far` is true if `far` is not 0 in some lane of the
/// warp.
#[cube]
pub(crate) fn voted<'a>(lse_delta: &LseDelta<'a>, #[comptime] kind: FragmentKind) -> LseDelta<'a> {
    LseDelta::<'a> {
        all: lse_delta.all,
        references: lse_delta.references,
        deltas: lse_delta.deltas,
        logarithms: lse_delta.logarithms,
        references_at: lse_delta.references_at,
        deltas_at: lse_delta.deltas_at,
        logarithms_at: lse_delta.logarithms_at,
        far: lse_delta.far,
        may_have_far: if comptime!(kind.raw) {
            // `uniform` waits for all lanes of the warp. It returns the bitwise or of the arguments of all lanes.
            uniform(u32::cast_from(lse_delta.far != 0.0f32)) != 0u32
        } else {
            false.runtime()
        },
    }
}

/// Returns 1 if the LSE of one of the thread's rows holds the mark of a far query, else 0.
#[cube]
pub(crate) fn rows_are_far(logsumexps: Pair, #[comptime] kind: FragmentKind) -> f32 {
    if comptime!(kind.raw) {
        let is_far = is_far(logsumexps.first) || is_far(logsumexps.second);
        select(is_far, 1.0f32, 0.0f32)
    } else {
        0.0f32.runtime()
    }
}

/// Returns the LSE of two queries. Each LSE is the sum of a reference (the row maximum that the softmax subtracts) and
/// a logarithm of row_sum. For each query, `wholes` holds the whole LSE in one f32, or the mark of a far query (a query
/// whose LSE needs two f32). For a query that is not far, the returned reference is the whole LSE, and the returned
/// logarithm is 0.
#[cube]
pub(crate) fn logsumexps_of_queries(
    lse_delta: &LseDelta<'_>,
    wholes: Pair,
    rows: &RowPair,
    first: i32,
    second: i32,
    q_len: i32,
) -> Logsumexps {
    let first = of_query(lse_delta.all, wholes.first, rows, first, q_len);
    let second = of_query(lse_delta.all, wholes.second, rows, second, q_len);
    Logsumexps {
        references: pair(first.reference, second.reference),
        logarithms: pair(first.logarithm, second.logarithm),
    }
}

/// An LSE as two f32: the reference (the row maximum) in natural units, and the logarithm of row_sum in log2 units.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Logsumexp {
    reference: f32,
    logarithm: f32,
}

#[cube]
fn of_query(all: &Tensor<f32>, whole: f32, rows: &RowPair, query: i32, q_len: i32) -> Logsumexp {
    let is_far = is_far(whole);
    // The index into the LSE tensor uses `head_0` for both rows, since both rows have the same head.
    let at = rows.batch as usize * all.stride(0)
        + rows.head_0 as usize * all.stride(1)
        + min(query, q_len - 1i32) as usize;
    Logsumexp {
        reference: select(is_far, all[at + REFERENCE * all.stride(2)], whole),
        logarithm: select(is_far, all[at + LOGARITHM * all.stride(2)] * LOG2_E, 0.0f32),
    }
}
