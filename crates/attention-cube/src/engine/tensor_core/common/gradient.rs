//! Computes P from S and the LSE, and dS from P and dP, in the registers of an accumulator.
//!
//! The *weight* of a score is its probability times the derivative of the softcap (the *slope*). The gradient of the loss
//! with respect to the score before the softcap is `weight · (dp − delta)`. A query is *far* if its LSE needs two f32 (see
//! [`far`](super::far)).

use crate::engine::tensor_core::common::block_mask::BlockMask;
use crate::engine::tensor_core::common::dropout::{KeepBits, dropped_pair, gradient_minus_delta};
use crate::engine::tensor_core::common::far::{has_far, logsumexps_of_queries, rows_are_far};
use crate::engine::tensor_core::common::mask::{PAIRS_PER_WORD, bits_of_word};
use crate::engine::tensor_core::common::score_mod::{final_scores, times_derivatives};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::softcap::{all_capped_together, capped, caps_together};
use crate::engine::tensor_core::common::{
    FragmentKind, Known, RowPair, known, own_column, pair_of, shown,
};
use crate::math::gradient::F16_P_SCALE;
use crate::math::score::{ScoreArguments, ScoreKind};
use crate::math::side::Side;
use crate::math::visibility::SeqLens;
use cube_kit::nvidia::Half;
use cube_kit::nvidia::accumulator::{Pair, is_second, pair};
use cube_kit::nvidia::ptx::{exp2, load_shared_pair, pack};
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

/// The LSE and delta of the queries in a thread's registers. If the fragment's rows are queries, this struct holds the
/// LSE and delta of the thread's two rows. If the fragment's columns are queries, this struct holds the shared-memory
/// addresses of the columns' LSE and delta.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct LseDelta<'a> {
    /// The LSE and delta of all queries, in global memory: `[batch, q_heads, 5, padded q_len]`. Row 0 of a head holds the
    /// LSE, or the mark −0 for a far query. Row 1 holds delta, and row 2 the logarithm of row_sum. Row 3 holds the reference
    /// of far queries, and row 4 the flags of far queries.
    pub all: &'a Tensor<f32>,
    /// One f32 per row. If the LSE of each row is stored as two f32 (the row maximum and a logarithm), this f32 is the
    /// row maximum. If the LSE is stored as one f32, this f32 is the LSE itself. The value −0 marks a
    /// [`far`](super::far) query.
    pub references: Pair,
    pub deltas: Pair,
    /// The logarithm of each row's row_sum in log2 units. row_sum is the sum of the exponentials after the subtraction
    /// of the row maximum.
    pub logarithms: Pair,
    pub references_at: u32,
    pub deltas_at: u32,
    pub logarithms_at: u32,
    /// Not 0 if this lane found a [`far`](super::far) query (a query whose LSE needs two f32). If the rows are queries,
    /// the lane tests its own rows. If the rows are keys, the lane tests the flags of far queries.
    pub far: f32,
    /// True if `far` is not 0 in some lane of the warp. The field is false until [`voted`](super::far::voted) sets it.
    pub may_have_far: bool,
}

/// Returns a copy of `rows` with the shared-memory addresses of a block's LSE and delta. The data of the block's `columns`
/// queries starts at address `at`. If the rows are queries, nothing reads these addresses.
#[cube]
pub(crate) fn lse_delta_of_block<'a>(
    rows: &LseDelta<'a>,
    at: u32,
    #[comptime] columns: usize,
) -> LseDelta<'a> {
    LseDelta::<'a> {
        all: rows.all,
        references: rows.references,
        deltas: rows.deltas,
        logarithms: rows.logarithms,
        references_at: at,
        deltas_at: at + comptime!(4 * columns as u32),
        logarithms_at: at + comptime!(8 * columns as u32),
        far: rows.far,
        may_have_far: rows.may_have_far,
    }
}

/// If the rows are queries, returns the LSE and delta of rows `row` and `row + 8`. If the rows are keys, only the field
/// `far` of the result has a meaning: it holds the argument `far`, which the caller computes from the flags of far
/// queries.
#[cube]
pub(crate) fn lse_delta_of_rows<'a>(
    lse_delta: &'a Tensor<f32>,
    batch: u32,
    head: u32,
    far: f32,
    row: i32,
    seq_lens: &SeqLens,
    #[comptime] kind: FragmentKind,
) -> LseDelta<'a> {
    let zero = f32::new(0.0);
    let mut logarithms = pair(zero, zero);
    if comptime!(kind.side == Side::Queries) {
        let start = batch as usize * lse_delta.stride(0) + head as usize * lse_delta.stride(1);
        let last = seq_lens.q_len - 1i32;
        let first = start + min(row, last) as usize;
        let second = start + min(row + 8i32, last) as usize;
        let to_deltas = lse_delta.stride(2);
        if comptime!(kind.has_logarithms()) {
            let to_logarithms = 2 * to_deltas;
            logarithms = pair(
                lse_delta[first + to_logarithms] * LOG2_E,
                lse_delta[second + to_logarithms] * LOG2_E,
            );
        }
        let references = pair(lse_delta[first], lse_delta[second]);
        LseDelta::<'a> {
            all: lse_delta,
            references,
            deltas: pair(lse_delta[first + to_deltas], lse_delta[second + to_deltas]),
            logarithms,
            references_at: 0u32.runtime(),
            deltas_at: 0u32.runtime(),
            logarithms_at: 0u32.runtime(),
            far: rows_are_far(references, kind),
            may_have_far: false.runtime(),
        }
    } else {
        LseDelta::<'a> {
            all: lse_delta,
            references: pair(zero, zero),
            deltas: pair(zero, zero),
            logarithms,
            references_at: 0u32.runtime(),
            deltas_at: 0u32.runtime(),
            logarithms_at: 0u32.runtime(),
            far,
            may_have_far: false.runtime(),
        }
    }
}

/// Returns one f32 for each register of the `pair`-th register pair. The f32 belongs to the register's query: it is the
/// LSE, the delta or the logarithm of row_sum, depending on the arguments. If the rows are queries, the f32 comes from
/// `rows`, else from shared memory at `address`.
#[cube]
fn lse_delta_of(rows: Pair, address: u32, #[comptime] pair: usize, #[comptime] side: Side) -> Pair {
    if comptime!(side == Side::Keys) {
        let at = address + comptime!(32 * (pair / 2) as u32) + UNIT_POS % 4u32 * 8u32;
        let own = load_shared_pair(at);
        Pair {
            first: own.extract(0usize),
            second: own.extract(1usize),
        }
    } else if comptime!(is_second(2 * pair)) {
        Pair {
            first: rows.second,
            second: rows.second,
        }
    } else {
        Pair {
            first: rows.first,
            second: rows.first,
        }
    }
}

/// Returns the logarithm of row_sum (log2 units) for each register of the `pair`-th register pair. The LSE is this logarithm
/// plus the reference.
#[cube]
fn logarithms_of(
    lse_delta: &LseDelta<'_>,
    #[comptime] pair: usize,
    #[comptime] side: Side,
) -> Pair {
    let own = lse_delta_of(lse_delta.logarithms, lse_delta.logarithms_at, pair, side);
    if comptime!(side == Side::Keys) {
        Pair {
            first: own.first * LOG2_E,
            second: own.second * LOG2_E,
        }
    } else {
        own
    }
}

/// True if a block takes the code path without masks: every row sees the whole block, and the tile has no far query (a query
/// whose LSE needs two f32).
#[cube]
fn is_plain(block_mask: &BlockMask, lse_delta: &LseDelta<'_>) -> bool {
    block_mask.whole && !lse_delta.may_have_far
}

/// The weights (P times the slope of the softcap) of a fragment's scores. If requested, this struct also holds P,
/// packed as the left operand of a GEMM.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct PAndDs<NS: Size, NP: Size> {
    pub w: Vector<f32, NS>,
    pub p: Vector<u32, NP>,
}

/// Computes the weights (P times the slope of the softcap) of the scores for `columns` columns, starting at
/// `first_column`. `s` holds the dot products. The weight is 0 where the row does not see the column. The returned `p`
/// is P after dropout, and `w` is computed from P before dropout.
#[cube]
pub(crate) fn weights<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    lse_delta: &LseDelta<'_>,
    first_column: i32,
    block_mask: &BlockMask,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    keep: &KeepBits,
    #[comptime] columns: usize,
    #[comptime] gives_p: bool,
    #[comptime] half: Half,
    #[comptime] kind: FragmentKind,
) -> PAndDs<NS, NP> {
    let arguments = &scoring.arguments;
    let mut w = s;
    let mut p = Vector::<u32, NP>::zeroed();
    if is_plain(block_mask, lse_delta) {
        let is_capped = comptime!(caps_together(kind.score) && !kind.raw && !kind.reads_ahead());
        let s = if comptime!(is_capped) {
            all_capped_together::<NS>(s, arguments, columns)
        } else {
            s
        };
        let known = known::<F, NB>(rows, scoring, kind);
        let mut logsumexps = no_logsumexps();
        #[unroll]
        for pair in 0..columns / 4 {
            let at = own_column(first_column, pair) as u32;
            let scored =
                scored::<F, NB, NS>(s, scoring, &known, first_column, at, pair, is_capped, kind);
            look_up_logsumexps(&mut logsumexps, lse_delta, pair, kind);
            let own = probabilities(scored.values, &logsumexps, arguments, false, kind);
            if comptime!(gives_p) {
                let packed = packed_p(own, half);
                p.insert(pair, dropped_pair(packed, keep, pair, kind.score.dropout));
            }
            let slopes = scored.slopes;
            if comptime!(kind.hides_single_keys()) {
                // A hidden score (bias of −∞ or mask mod) may be NaN, and 0 · NaN is NaN. `sloped` therefore returns a
                // weight of 0 for a probability of 0.
                w.insert(comptime!(2 * pair), sloped(own.first, slopes.first, kind));
                w.insert(
                    comptime!(2 * pair + 1),
                    sloped(own.second, slopes.second, kind),
                );
            } else {
                w.insert(comptime!(2 * pair), own.first * slopes.first);
                w.insert(comptime!(2 * pair + 1), own.second * slopes.second);
            }
        }
    } else if lse_delta.may_have_far {
        let made = masked_weights::<F, NB, NS, NP>(
            s,
            lse_delta,
            first_column,
            block_mask,
            rows,
            scoring,
            keep,
            columns,
            gives_p,
            half,
            true,
            kind,
        );
        w = made.w;
        p = made.p;
    } else {
        let made = masked_weights::<F, NB, NS, NP>(
            s,
            lse_delta,
            first_column,
            block_mask,
            rows,
            scoring,
            keep,
            columns,
            gives_p,
            half,
            false,
            kind,
        );
        w = made.w;
        p = made.p;
    }
    PAndDs::<NS, NP> { w, p }
}

/// Computes [`weights`] of a block that is not fully visible. With `far`, the block may also be fully visible, and the tile
/// may have far queries (queries whose LSE needs two f32).
#[cube]
fn masked_weights<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    lse_delta: &LseDelta<'_>,
    first_column: i32,
    block_mask: &BlockMask,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    keep: &KeepBits,
    #[comptime] columns: usize,
    #[comptime] gives_p: bool,
    #[comptime] half: Half,
    #[comptime] far: bool,
    #[comptime] kind: FragmentKind,
) -> PAndDs<NS, NP> {
    let arguments = &scoring.arguments;
    let mut w = s;
    let mut p = Vector::<u32, NP>::zeroed();
    let known = known::<F, NB>(rows, scoring, kind);
    let has_far = if comptime!(far) {
        has_far(lse_delta, columns, kind)
    } else {
        false.runtime()
    };
    let mut bits_0 = u32::new(0);
    let mut bits_1 = u32::new(0);
    let mut logsumexps = no_logsumexps();
    #[unroll]
    for pair in 0..columns / 4 {
        if comptime!(kind.structure.is_irregular() && pair % PAIRS_PER_WORD == 0) {
            let word = comptime!(pair / PAIRS_PER_WORD);
            let bits = bits_of_word(block_mask.mask_words, &known, first_column, word);
            bits_0 = bits.first;
            bits_1 = bits.second;
            if comptime!(far) {
                // The kernel loads no mask words for a fully visible block, so set all bits here.
                bits_0 = select(block_mask.whole, 0xffff_ffffu32, bits_0);
                bits_1 = select(block_mask.whole, 0xffff_ffffu32, bits_1);
            }
        }
        let at = own_column(first_column, pair);
        let existing = min(at as u32, known.last_pair);
        let scored = scored::<F, NB, NS>(
            s,
            scoring,
            &known,
            first_column,
            existing,
            pair,
            false,
            kind,
        );
        let values = shown(
            scored.values,
            &known,
            if comptime!(is_second(2 * pair)) {
                bits_1
            } else {
                bits_0
            },
            at,
            arguments.negative_infinity,
            pair,
            kind,
        );
        look_up_logsumexps(&mut logsumexps, lse_delta, pair, kind);
        if comptime!(kind.raw && far && is_looked_up(pair, kind)) {
            let (first, second) = queries_of_pair(rows, at, pair, kind);
            if has_far {
                let q_len = scoring.masking.seq_lens.q_len;
                let wholes = logsumexps.references;
                let own = logsumexps_of_queries(lse_delta, wholes, rows, first, second, q_len);
                logsumexps.references = own.references;
                logsumexps.logarithms = own.logarithms;
            }
        }
        let own = probabilities(values, &logsumexps, arguments, far, kind);
        if comptime!(gives_p) {
            let packed = packed_p(own, half);
            p.insert(pair, dropped_pair(packed, keep, pair, kind.score.dropout));
        }
        // A hidden score may be NaN, and 0 · NaN is NaN. `sloped` therefore returns a weight of 0 for a probability of 0.
        w.insert(
            comptime!(2 * pair),
            sloped(own.first, scored.slopes.first, kind),
        );
        w.insert(
            comptime!(2 * pair + 1),
            sloped(own.second, scored.slopes.second, kind),
        );
    }
    PAndDs::<NS, NP> { w, p }
}

/// The LSEs that belong to the two registers of a register pair. Each LSE is the sum of a reference (the row maximum)
/// and the logarithm of row_sum.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Logsumexps {
    /// If an LSE is stored as two f32 (the row maximum and a logarithm), the row maximum. If the LSE is stored as one
    /// f32, the LSE itself.
    pub references: Pair,
    /// The logarithm of each row_sum in log2 units, or 0 if the LSE is stored as one f32.
    pub logarithms: Pair,
}

#[cube]
fn no_logsumexps() -> Logsumexps {
    Logsumexps {
        references: pair(f32::new(0.0), f32::new(0.0)),
        logarithms: pair(f32::new(0.0), f32::new(0.0)),
    }
}

/// True if the values per query must be looked up for the `pair`-th register pair, because the preceding pair belongs to
/// other queries. If the rows are queries, this holds for every pair. If the rows are keys, pairs `2i` and `2i + 1` have
/// the same columns, which are their queries. Then only pair `2i` needs a lookup.
const fn is_looked_up(pair: usize, kind: FragmentKind) -> bool {
    matches!(kind.side, Side::Queries) || pair.is_multiple_of(2)
}

/// Returns the query indices of the two registers in the `pair`-th register pair. The first column of the pair is `column`.
#[cube]
fn queries_of_pair(
    rows: &RowPair,
    column: i32,
    #[comptime] pair: usize,
    #[comptime] kind: FragmentKind,
) -> (i32, i32) {
    if comptime!(kind.side == Side::Keys) {
        (column, column + 1i32)
    } else if comptime!(is_second(2 * pair)) {
        (rows.position_1, rows.position_1)
    } else {
        (rows.position_0, rows.position_0)
    }
}

/// Loads the LSEs of the queries in the `pair`-th register pair into `logsumexps`. If the preceding pair has the same
/// queries, `logsumexps` already holds these LSEs, and the function loads nothing.
#[cube]
fn look_up_logsumexps(
    logsumexps: &mut Logsumexps,
    lse_delta: &LseDelta<'_>,
    #[comptime] pair: usize,
    #[comptime] kind: FragmentKind,
) {
    if comptime!(is_looked_up(pair, kind)) {
        logsumexps.references = lse_delta_of(
            lse_delta.references,
            lse_delta.references_at,
            pair,
            kind.side,
        );
        if comptime!(kind.has_logarithms()) {
            logsumexps.logarithms = logarithms_of(lse_delta, pair, kind.side);
        }
    }
}

/// Computes the probabilities of two scores, each with its own LSE. See [`probability`].
#[cube]
fn probabilities(
    values: Pair,
    logsumexps: &Logsumexps,
    arguments: &ScoreArguments,
    #[comptime] apart: bool,
    #[comptime] kind: FragmentKind,
) -> Pair {
    let references = logsumexps.references;
    let logarithms = logsumexps.logarithms;
    Pair {
        first: probability(
            values.first,
            references.first,
            logarithms.first,
            arguments,
            apart,
            kind,
        ),
        second: probability(
            values.second,
            references.second,
            logarithms.second,
            arguments,
            apart,
            kind,
        ),
    }
}

/// Computes a probability. `value` is a score, or an unscaled dot product if the kernel is `raw`. If `apart`, the LSE is
/// `reference` (the row maximum) plus `logarithm`. Otherwise `reference` holds the whole LSE.
///
/// The reference is subtracted before the conversion to log2 units, because converting a very large score would lose
/// precision.
#[cube]
fn probability(
    value: f32,
    reference: f32,
    logarithm: f32,
    arguments: &ScoreArguments,
    #[comptime] apart: bool,
    #[comptime] kind: FragmentKind,
) -> f32 {
    let difference = if comptime!(!kind.raw) {
        value - reference
    } else if comptime!(apart) {
        // The scaled dot product must be rounded as in the forward. `fma` with 0 rounds the product, and keeps the compiler
        // from fusing the multiplication with the subtraction.
        fma(value, arguments.scale, 0.0f32) - reference
    } else {
        fma(value, arguments.scale, -reference)
    };
    if comptime!(kind.has_logarithms() || kind.raw && apart) {
        exp2(fma(difference, LOG2_E, -logarithm))
    } else {
        exp2(difference * LOG2_E)
    }
}

/// Returns the factor by which the kernel multiplies P before it rounds P to half precision. Without the factor, small
/// probabilities would lose bits in f16. The kernel later divides dV by the factor.
pub(crate) const fn p_scale(half: Half) -> f32 {
    match half {
        Half::F16 => F16_P_SCALE,
        Half::Bf16 => 1.0,
    }
}

/// Packs two probabilities into a word of the left operand of a GEMM.
#[cube]
fn packed_p(p: Pair, #[comptime] half: Half) -> u32 {
    if comptime!(half == Half::F16) {
        let scale = f32::new(comptime!(p_scale(half)));
        pack(p.first * scale, p.second * scale, half)
    } else {
        pack(p.first, p.second, half)
    }
}

/// Returns the probability times the slope of the softcap. If the probability is 0, the result is 0, because the slope
/// of a hidden score may be NaN.
#[cube]
fn sloped(probability: f32, slope: f32, #[comptime] kind: FragmentKind) -> f32 {
    if comptime!(kind.score.has_slope()) {
        select(probability == 0.0f32, 0.0f32, probability * slope)
    } else {
        probability
    }
}

/// Two scores, and the derivative of each score with respect to its scaled dot product.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Scored {
    values: Pair,
    slopes: Pair,
}

/// Computes the scores of the `pair`-th register pair, or the unscaled dot products if the kernel is `raw`. If
/// `is_capped`, `s` holds scores after the softcap instead of dot products.
#[cube]
fn scored<F: Float, NB: Size, NS: Size>(
    s: Vector<f32, NS>,
    scoring: &Scoring<F, NB>,
    known: &Known,
    first_column: i32,
    at: u32,
    #[comptime] pair: usize,
    #[comptime] is_capped: bool,
    #[comptime] kind: FragmentKind,
) -> Scored {
    let arguments = &scoring.arguments;
    let dots = pair_of::<NS>(s, pair);
    let one = Pair {
        first: f32::new(1.0),
        second: f32::new(1.0),
    };
    // A `raw` kernel (unscaled dot products, no softcap) needs no slopes. If the kernel has loaded the biases early,
    // `s` already holds scores. A kernel with early loads needs no slopes either: such a kernel has no softcap and no
    // score mod, or it computes the bias gradient. In both cases, each slope is 1.
    if comptime!(kind.raw || kind.reads_ahead()) {
        Scored {
            values: dots,
            slopes: one,
        }
    } else {
        let capped = if comptime!(is_capped) {
            dots
        } else {
            capped(dots, arguments, kind.score)
        };
        let mut slopes = one;
        if comptime!(kind.has_slope && kind.score.softcap) {
            slopes = Pair {
                first: slope(capped.first, arguments, kind.score),
                second: slope(capped.second, arguments, kind.score),
            };
        }
        if comptime!(kind.has_slope && kind.score.score_mod.is_some()) {
            slopes = times_derivatives::<F, NB>(
                slopes,
                capped,
                scoring,
                known,
                first_column,
                at,
                pair,
                kind,
            );
        }
        Scored {
            values: final_scores::<F, NB>(
                capped,
                scoring,
                known,
                first_column,
                at,
                pair,
                false,
                kind,
            ),
            slopes,
        }
    }
}

/// Returns the derivative of `c · tanh(x / c)` at x, where c is the softcap. `capped` is the value of this function at
/// x.
#[cube]
fn slope(capped: f32, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> f32 {
    let tanh = if comptime!(kind.wide_softcap) {
        capped / arguments.softcap
    } else {
        // The reciprocal of the softcap is computed once. A division per score would compile to a function call per score.
        capped * (1.0f32 / arguments.softcap)
    };
    fma(-tanh, tanh, 1.0f32)
}

/// Computes dS, the gradient with respect to the scaled dot products, from the weights `w` and from dP. The result is packed
/// as the left operand of a GEMM.
///
/// With dropout, the result is dS divided by `kept`, the factor by which dropout multiplies kept probabilities. See
/// [`gradient_minus_delta`].
///
/// dP may hold any value (even NaN) where a score is hidden. dS is 0 there.
#[cube]
pub(crate) fn dot_gradients<NS: Size, NP: Size>(
    w: Vector<f32, NS>,
    dp: Vector<f32, NS>,
    lse_delta: &LseDelta<'_>,
    keep: &KeepBits,
    block_mask: &BlockMask,
    #[comptime] columns: usize,
    #[comptime] half: Half,
    #[comptime] kind: FragmentKind,
) -> Vector<u32, NP> {
    let mut ds = Vector::<u32, NP>::zeroed();
    if is_plain(block_mask, lse_delta) && comptime!(!kind.hides_single_keys()) {
        let mut delta_0 = f32::new(0.0);
        let mut delta_1 = f32::new(0.0);
        #[unroll]
        for pair in 0..columns / 4 {
            if comptime!(kind.side == Side::Queries || pair % 2 == 0) {
                let delta = lse_delta_of(lse_delta.deltas, lse_delta.deltas_at, pair, kind.side);
                delta_0 = delta.first;
                delta_1 = delta.second;
            }
            let first = w.extract(comptime!(2 * pair))
                * difference::<NS>(dp, delta_0, keep, comptime!(2 * pair), kind);
            let second = w.extract(comptime!(2 * pair + 1))
                * difference::<NS>(dp, delta_1, keep, comptime!(2 * pair + 1), kind);
            ds.insert(pair, pack(first, second, half));
        }
    } else {
        let mut delta_0 = f32::new(0.0);
        let mut delta_1 = f32::new(0.0);
        #[unroll]
        for pair in 0..columns / 4 {
            if comptime!(kind.side == Side::Queries || pair % 2 == 0) {
                let delta = lse_delta_of(lse_delta.deltas, lse_delta.deltas_at, pair, kind.side);
                delta_0 = delta.first;
                delta_1 = delta.second;
            }
            let first = seen_gradient(
                w.extract(comptime!(2 * pair)),
                difference::<NS>(dp, delta_0, keep, comptime!(2 * pair), kind),
            );
            let second = seen_gradient(
                w.extract(comptime!(2 * pair + 1)),
                difference::<NS>(dp, delta_1, keep, comptime!(2 * pair + 1), kind),
            );
            ds.insert(pair, pack(first, second, half));
        }
    }
    ds
}

/// Returns [`gradient_minus_delta`] for one register of dP.
#[cube]
fn difference<NS: Size>(
    dp: Vector<f32, NS>,
    delta: f32,
    keep: &KeepBits,
    #[comptime] register: usize,
    #[comptime] kind: FragmentKind,
) -> f32 {
    gradient_minus_delta(
        dp.extract(register),
        delta,
        keep,
        register,
        kind.score.dropout,
    )
}

#[cube]
fn seen_gradient(weight: f32, difference: f32) -> f32 {
    select(weight == 0.0f32, 0.0f32, weight * difference)
}
