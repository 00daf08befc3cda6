//! From scores and the gradients of P to the gradients of scores, on an accumulator's registers: see
//! `fragment/mod.rs` for what a thread has of them.
//!
//! With a query's terms, its logsumexp and Δ, a score's *weight* is its probability times the
//! slope of the softcap, and its gradient the weight times `dp − Δ`.

use crate::fragment::bias::with_bias;
use crate::fragment::far::{logsumexps_of_queries, rows_have_far};
use crate::fragment::mask::{PAIRS_PER_WORD, bits_of_word};
use crate::fragment::scoring::Scoring;
use crate::fragment::softcap::capped;
use crate::fragment::view::View;
use crate::fragment::{FragmentKind, Known, RowPair, known, own_column, pair_of, shown};
use crate::math::gradient::F16_P_SCALE;
use crate::math::score::{ScoreArguments, ScoreKind};
use crate::math::side::Side;
use crate::math::visibility::Extent;
use cube_kit::hopper::Half;
use cube_kit::hopper::accumulator::{Pair, is_second, pair};
use cube_kit::hopper::ptx::{exp2, load_shared_pair, pack};
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

/// The queries' terms: of the thread's rows, or, where the columns are queries, the places of these in shared
/// memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Terms<'a> {
    /// Of all queries, in memory.
    pub all: &'a Tensor<f32>,
    /// Or the logsumexps themselves, where these are one number: −0 for a query that is [`far`](super::far).
    pub references: Pair,
    pub deltas: Pair,
    /// Of the sums by the references, in powers of two.
    pub logarithms: Pair,
    pub references_at: u32,
    pub deltas_at: u32,
    pub logarithms_at: u32,
    /// Whether one of the warp's rows is [`far`](super::far).
    pub rows_have_far: bool,
}

/// The terms of blocks' queries, of `columns` of which a stage has all at `at`; or of the rows, which these `rows` are.
#[cube]
pub(crate) fn terms_of_block<'a>(
    rows: &Terms<'a>,
    at: u32,
    #[comptime] columns: usize,
) -> Terms<'a> {
    Terms::<'a> {
        all: rows.all,
        references: rows.references,
        deltas: rows.deltas,
        logarithms: rows.logarithms,
        references_at: at,
        deltas_at: at + comptime!(4 * columns as u32),
        logarithms_at: at + comptime!(8 * columns as u32),
        rows_have_far: rows.rows_have_far,
    }
}

/// The terms of the thread's rows, `row` and the 8th after it, where these are queries.
#[cube]
pub(crate) fn terms_of_rows<'a>(
    terms: &'a Tensor<f32>,
    batch: u32,
    head: u32,
    row: i32,
    extent: &Extent,
    #[comptime] kind: FragmentKind,
) -> Terms<'a> {
    let zero = f32::new(0.0);
    let mut logarithms = pair(zero, zero);
    if comptime!(kind.side == Side::Queries) {
        let start = batch as usize * terms.stride(0) + head as usize * terms.stride(1);
        let last = extent.q_len - 1i32;
        let first = start + min(row, last) as usize;
        let second = start + min(row + 8i32, last) as usize;
        let to_deltas = terms.stride(2);
        if comptime!(kind.has_logarithms()) {
            let to_logarithms = 2 * to_deltas;
            logarithms = pair(
                terms[first + to_logarithms] * LOG2_E,
                terms[second + to_logarithms] * LOG2_E,
            );
        }
        let references = pair(terms[first], terms[second]);
        Terms::<'a> {
            all: terms,
            references,
            deltas: pair(terms[first + to_deltas], terms[second + to_deltas]),
            logarithms,
            references_at: 0u32.runtime(),
            deltas_at: 0u32.runtime(),
            logarithms_at: 0u32.runtime(),
            rows_have_far: rows_have_far(references, kind),
        }
    } else {
        Terms::<'a> {
            all: terms,
            references: pair(zero, zero),
            deltas: pair(zero, zero),
            logarithms,
            references_at: 0u32.runtime(),
            deltas_at: 0u32.runtime(),
            logarithms_at: 0u32.runtime(),
            rows_have_far: false.runtime(),
        }
    }
}

/// The `pair`-th two registers' terms.
#[cube]
fn terms_of(rows: Pair, address: u32, #[comptime] pair: usize, #[comptime] side: Side) -> Pair {
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

/// The `pair`-th two registers' logarithms, in powers of two.
#[cube]
fn logarithms_of(terms: &Terms<'_>, #[comptime] pair: usize, #[comptime] side: Side) -> Pair {
    let own = terms_of(terms.logarithms, terms.logarithms_at, pair, side);
    if comptime!(side == Side::Keys) {
        Pair {
            first: own.first * LOG2_E,
            second: own.second * LOG2_E,
        }
    } else {
        own
    }
}

/// The weights of a fragment, and P as the left operand of a product, where that is asked for.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Weights<NS: Size, NP: Size> {
    pub w: Vector<f32, NS>,
    pub p: Vector<u32, NP>,
}

/// The weights of the scores that become of the dots `s`, of `columns` columns from `first_column` on; 0 where
/// the one does not see the other. In a `whole` block nothing is hidden, but by a bias.
#[cube]
pub(crate) fn weights<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    terms: &Terms<'_>,
    first_column: i32,
    seen: &View,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    has_far: bool,
    #[comptime] columns: usize,
    #[comptime] gives_p: bool,
    #[comptime] half: Half,
    #[comptime] kind: FragmentKind,
) -> Weights<NS, NP> {
    let arguments = &scoring.arguments;
    let mut w = s;
    let mut p = Vector::<u32, NP>::zeroed();
    // Far queries take the branch that asks for everything, so that the usual one has no more to do.
    if seen.whole && !has_far {
        let known = known::<F, NB>(rows, scoring, kind);
        let mut logsumexps = no_logsumexps();
        #[unroll]
        for pair in 0..columns / 4 {
            let at = own_column(first_column, pair) as u32;
            let scored = scored::<F, NB, NS>(s, scoring, &known, at, pair, kind);
            look_up_logsumexps(&mut logsumexps, terms, pair, kind);
            let own = probabilities(scored.values, &logsumexps, arguments, false, kind);
            if comptime!(gives_p) {
                p.insert(pair, packed_p(own, half));
            }
            let slopes = scored.slopes;
            if comptime!(kind.has_own_biases()) {
                // Where the bias hides a key, the slope may be no number.
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
    } else {
        let known = known::<F, NB>(rows, scoring, kind);
        let mut bits_0 = u32::new(0);
        let mut bits_1 = u32::new(0);
        let mut logsumexps = no_logsumexps();
        #[unroll]
        for pair in 0..columns / 4 {
            if comptime!(kind.structure.is_irregular() && pair % PAIRS_PER_WORD == 0) {
                let word = comptime!(pair / PAIRS_PER_WORD);
                let bits = bits_of_word(seen.mask_words, &known, first_column, word);
                bits_0 = bits.first;
                bits_1 = bits.second;
            }
            let at = own_column(first_column, pair);
            let existing = min(at as u32, known.last_pair);
            let scored = scored::<F, NB, NS>(s, scoring, &known, existing, pair, kind);
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
            look_up_logsumexps(&mut logsumexps, terms, pair, kind);
            if comptime!(kind.raw && is_looked_up(pair, kind)) {
                let (first, second) = queries_of_pair(rows, at, pair, kind);
                if has_far {
                    let q_len = scoring.masking.extent.q_len;
                    let wholes = logsumexps.references;
                    let own = logsumexps_of_queries(terms, wholes, rows, first, second, q_len);
                    logsumexps.references = own.references;
                    logsumexps.logarithms = own.logarithms;
                }
            }
            let own = probabilities(values, &logsumexps, arguments, true, kind);
            if comptime!(gives_p) {
                p.insert(pair, packed_p(own, half));
            }
            // The slope where nothing is seen may be no number.
            w.insert(
                comptime!(2 * pair),
                sloped(own.first, scored.slopes.first, kind),
            );
            w.insert(
                comptime!(2 * pair + 1),
                sloped(own.second, scored.slopes.second, kind),
            );
        }
    }
    Weights::<NS, NP> { w, p }
}

/// The logsumexps of two registers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Logsumexps {
    /// The logsumexps themselves, where these are one number.
    pub references: Pair,
    /// In powers of two.
    pub logarithms: Pair,
}

#[cube]
fn no_logsumexps() -> Logsumexps {
    Logsumexps {
        references: pair(f32::new(0.0), f32::new(0.0)),
        logarithms: pair(f32::new(0.0), f32::new(0.0)),
    }
}

/// Whether the `pair`-th two registers' queries are others than those of the last: two rows have the same columns.
const fn is_looked_up(pair: usize, kind: FragmentKind) -> bool {
    matches!(kind.side, Side::Queries) || pair.is_multiple_of(2)
}

/// The queries of the `pair`-th two registers, whose first column is `column`.
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

/// Looks up the `pair`-th two registers' logsumexps, where they are others than those of the last.
#[cube]
fn look_up_logsumexps(
    logsumexps: &mut Logsumexps,
    terms: &Terms<'_>,
    #[comptime] pair: usize,
    #[comptime] kind: FragmentKind,
) {
    if comptime!(is_looked_up(pair, kind)) {
        logsumexps.references = terms_of(terms.references, terms.references_at, pair, kind.side);
        if comptime!(kind.has_logarithms()) {
            logsumexps.logarithms = logarithms_of(terms, pair, kind.side);
        }
    }
}

/// The probabilities of two scores.
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

/// The probability of a score, or of a dot that waits for its scale, by a logsumexp whole or, where it is far, `apart`. The difference is taken before the change to
/// powers of two: where scores are huge, it is all that f32 holds finely enough.
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
        // Rounded as the forward's was: a product alone might be fused with the difference.
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

/// What P is multiplied with before it is rounded to half precision, and the values' gradient divided by.
pub(crate) const fn p_scale(half: Half) -> f32 {
    match half {
        Half::F16 => F16_P_SCALE,
        Half::Bf16 => 1.0,
    }
}

/// Two probabilities as a product's operand.
#[cube]
fn packed_p(p: Pair, #[comptime] half: Half) -> u32 {
    if comptime!(half == Half::F16) {
        let scale = f32::new(comptime!(p_scale(half)));
        pack(p.first * scale, p.second * scale, half)
    } else {
        pack(p.first, p.second, half)
    }
}

/// The probability times the slope, 0 where the probability is.
#[cube]
fn sloped(probability: f32, slope: f32, #[comptime] kind: FragmentKind) -> f32 {
    if comptime!(kind.score.softcap) {
        select(probability == 0.0f32, 0.0f32, probability * slope)
    } else {
        probability
    }
}

/// Scores, and their derivatives by the scaled dots.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Scored {
    values: Pair,
    slopes: Pair,
}

/// The `pair`-th two registers' scores; dots that wait for their scale, where the kind is raw.
#[cube]
fn scored<F: Float, NB: Size, NS: Size>(
    s: Vector<f32, NS>,
    scoring: &Scoring<F, NB>,
    known: &Known,
    at: u32,
    #[comptime] pair: usize,
    #[comptime] kind: FragmentKind,
) -> Scored {
    let arguments = &scoring.arguments;
    let dots = pair_of::<NS>(s, pair);
    let one = Pair {
        first: f32::new(1.0),
        second: f32::new(1.0),
    };
    if comptime!(kind.raw) {
        Scored {
            values: dots,
            slopes: one,
        }
    } else {
        let capped = capped(dots, arguments, kind.score);
        let slopes = if comptime!(kind.has_slope) {
            Pair {
                first: slope(capped.first, arguments, kind.score),
                second: slope(capped.second, arguments, kind.score),
            }
        } else {
            one
        };
        let hidden = arguments.negative_infinity;
        Scored {
            values: with_bias::<F, NB>(capped, &scoring.bias, known, at, hidden, pair, kind),
            slopes,
        }
    }
}

/// The derivative of `c tanh(x / c)` by x, from its value.
#[cube]
fn slope(capped: f32, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> f32 {
    let tanh = if comptime!(kind.wide_softcap) {
        capped / arguments.softcap
    } else {
        // A quotient for each score would be a function's call for each; this one is made once.
        capped * (1.0f32 / arguments.softcap)
    };
    fma(-tanh, tanh, 1.0f32)
}

/// The gradients of the scaled dots as the left operand of a product, from their weights and the gradients of P.
/// Where a block is not `whole`, the latter may be anything where nothing is seen.
#[cube]
pub(crate) fn dot_gradients<NS: Size, NP: Size>(
    w: Vector<f32, NS>,
    dp: Vector<f32, NS>,
    terms: &Terms<'_>,
    whole: bool,
    #[comptime] columns: usize,
    #[comptime] half: Half,
    #[comptime] kind: FragmentKind,
) -> Vector<u32, NP> {
    let mut ds = Vector::<u32, NP>::zeroed();
    if whole && comptime!(!kind.has_own_biases()) {
        let mut delta_0 = f32::new(0.0);
        let mut delta_1 = f32::new(0.0);
        #[unroll]
        for pair in 0..columns / 4 {
            if comptime!(kind.side == Side::Queries || pair % 2 == 0) {
                let delta = terms_of(terms.deltas, terms.deltas_at, pair, kind.side);
                delta_0 = delta.first;
                delta_1 = delta.second;
            }
            let first =
                w.extract(comptime!(2 * pair)) * (dp.extract(comptime!(2 * pair)) - delta_0);
            let second = w.extract(comptime!(2 * pair + 1))
                * (dp.extract(comptime!(2 * pair + 1)) - delta_1);
            ds.insert(pair, pack(first, second, half));
        }
    } else {
        let mut delta_0 = f32::new(0.0);
        let mut delta_1 = f32::new(0.0);
        #[unroll]
        for pair in 0..columns / 4 {
            if comptime!(kind.side == Side::Queries || pair % 2 == 0) {
                let delta = terms_of(terms.deltas, terms.deltas_at, pair, kind.side);
                delta_0 = delta.first;
                delta_1 = delta.second;
            }
            let first = seen_gradient(
                w.extract(comptime!(2 * pair)),
                dp.extract(comptime!(2 * pair)),
                delta_0,
            );
            let second = seen_gradient(
                w.extract(comptime!(2 * pair + 1)),
                dp.extract(comptime!(2 * pair + 1)),
                delta_1,
            );
            ds.insert(pair, pack(first, second, half));
        }
    }
    ds
}

#[cube]
fn seen_gradient(weight: f32, dp: f32, delta: f32) -> f32 {
    select(weight == 0.0f32, 0.0f32, weight * (dp - delta))
}
