//! Scores so large that f32 does not hold a query's logsumexp finely enough.
//!
//! A backward with one number a query subtracts the logsumexp from the exact product of dot and scale, in one fused operation. The
//! logsumexp was rounded, and from [`FAR`](crate::passes::delta::kernel::FAR) on that shows in P: of 10⁸ it is off by 4, and P by a factor of 50.
//! The terms of such a query mark it as far, and keep its reference and its logarithm. A block with a far query is treated like one
//! in which something is hidden: it rounds the product as the forward did, so that the row's own maximum leaves exactly 0, and
//! subtracts reference and logarithm one after the other. Other blocks pay one vote.

use super::gradient::{Logsumexps, Terms};
use super::{FragmentKind, RowPair};
use crate::math::side::Side;
use crate::passes::delta::kernel::{LOGARITHM, REFERENCE, is_far};
use cube_kit::hopper::accumulator::{Pair, pair};
use cube_kit::hopper::ptx::load_shared_pair;
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

/// Whether one of a warp's queries is far: of its rows, or of `columns` columns whose terms are in shared memory.
#[cube]
pub(crate) fn has_far(
    terms: &Terms<'_>,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> bool {
    if comptime!(!kind.raw) {
        false.runtime()
    } else if comptime!(kind.side == Side::Queries) {
        terms.rows_have_far
    } else {
        let mut far = false.runtime();
        #[unroll]
        for part in 0..comptime!(columns.div_ceil(64)) {
            // Behind the last two columns come these once more.
            let column = UNIT_POS % 32u32 * 2u32 + comptime!(64 * part as u32);
            let column = min(column, comptime!(columns as u32 - 2));
            let own = load_shared_pair(terms.references_at + 4u32 * column);
            far = far || is_far(own.extract(0usize)) || is_far(own.extract(1usize));
        }
        plane_any(far)
    }
}

/// Whether one of a warp's rows is far, by their logsumexps.
#[cube]
pub(crate) fn rows_have_far(logsumexps: Pair, #[comptime] kind: FragmentKind) -> bool {
    if comptime!(kind.raw) {
        plane_any(is_far(logsumexps.first) || is_far(logsumexps.second))
    } else {
        false.runtime()
    }
}

/// The logsumexps of two queries in two numbers; of one that is not far, whole and 0.
#[cube]
pub(crate) fn logsumexps_of_queries(
    terms: &Terms<'_>,
    wholes: Pair,
    rows: &RowPair,
    first: i32,
    second: i32,
    q_len: i32,
) -> Logsumexps {
    let first = of_query(terms.all, wholes.first, rows, first, q_len);
    let second = of_query(terms.all, wholes.second, rows, second, q_len);
    Logsumexps {
        references: pair(first.reference, second.reference),
        logarithms: pair(first.logarithm, second.logarithm),
    }
}

/// A logsumexp in two numbers, of which the logarithm is in powers of two.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Logsumexp {
    reference: f32,
    logarithm: f32,
}

#[cube]
fn of_query(all: &Tensor<f32>, whole: f32, rows: &RowPair, query: i32, q_len: i32) -> Logsumexp {
    let is_far = is_far(whole);
    // The heads of both rows are one.
    let at = rows.batch as usize * all.stride(0)
        + rows.head_0 as usize * all.stride(1)
        + min(query, q_len - 1i32) as usize;
    Logsumexp {
        reference: select(is_far, all[at + REFERENCE * all.stride(2)], whole),
        logarithm: select(is_far, all[at + LOGARITHM * all.stride(2)] * LOG2_E, 0.0f32),
    }
}
