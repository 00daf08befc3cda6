//! Applies the user's score mod and mask mod to the scores of a fragment.

use super::bias::with_bias;
use super::scoring::Scoring;
use super::{FragmentKind, Known, own_column};
use crate::math::score_mod::ScorePlace;
use crate::math::score_mod::kernel::{changed_score, derivative_of_change, shown_score};
use crate::math::side::Side;
use cube_kit::nvidia::accumulator::{Pair, column, is_second};
use cubecl::prelude::*;

/// Returns the query and key positions of the two scores of the `pair`-th register pair. The block of scores begins at
/// column `first_column`. `at` is the pair's first column. If the pair lies past the problem's last column, `at` is
/// instead the first column of the problem's last pair.
///
/// The result also holds the distance between query and key as f32. To compute this distance, the kernel converts one
/// integer per row to f32, and adds one constant per column.
#[cube]
fn places(
    known: &Known,
    first_column: i32,
    at: u32,
    #[comptime] pair: usize,
    #[comptime] kind: FragmentKind,
) -> (ScorePlace, ScorePlace) {
    let rows = known.rows;
    let offset = rows.seq_info.offset;
    let at = at as i32;
    let first_column = own_column(first_column, 0usize);
    let column = comptime!(column(2 * pair));
    let mut head = rows.head_0;
    let mut row = rows.position_0;
    if comptime!(is_second(2 * pair)) {
        head = rows.head_1;
        row = rows.position_1;
    }
    if comptime!(kind.side == Side::Queries) {
        let distance = f32::cast_from(row + offset - first_column);
        let first = ScorePlace::new(rows.batch, head, row, at, offset);
        let second = ScorePlace::new(rows.batch, head, row, at + 1i32, offset);
        (
            first.with_float_distance(distance - comptime!(column as f32)),
            second.with_float_distance(distance - comptime!((column + 1) as f32)),
        )
    } else {
        let distance = f32::cast_from(first_column + offset - row);
        let first = ScorePlace::new(rows.batch, head, at, row, offset);
        let second = ScorePlace::new(rows.batch, head, at + 1i32, row, offset);
        (
            first.with_float_distance(distance + comptime!(column as f32)),
            second.with_float_distance(distance + comptime!((column + 1) as f32)),
        )
    }
}

/// Returns the two scores of the `pair`-th register pair after score mod, bias and mask mod. `capped` holds the scores
/// before these three steps.
#[cube]
pub(crate) fn final_scores<F: Float, NB: Size>(
    capped: Pair,
    scoring: &Scoring<F, NB>,
    known: &Known,
    first_column: i32,
    at: u32,
    #[comptime] pair: usize,
    #[comptime] kind: FragmentKind,
) -> Pair {
    let hidden = scoring.arguments.negative_infinity;
    let mut scores = capped;
    if comptime!(kind.score.score_mod.is_some()) {
        let (first, second) = places(known, first_column, at, pair, kind);
        let tables = &scoring.tables;
        scores = Pair {
            first: changed_score(scores.first, first, tables, kind.score.score_mod),
            second: changed_score(scores.second, second, tables, kind.score.score_mod),
        };
    }
    scores = with_bias::<F, NB>(scores, &scoring.bias, known, at, hidden, pair, kind);
    if comptime!(kind.score.mask_mod.is_some()) {
        let (first, second) = places(known, first_column, at, pair, kind);
        let tables = &scoring.tables;
        scores = Pair {
            first: shown_score(scores.first, first, tables, hidden, kind.score.mask_mod),
            second: shown_score(scores.second, second, tables, hidden, kind.score.mask_mod),
        };
    }
    scores
}

/// Returns `slopes` times the derivatives of the score mod at the scores `capped`.
#[cube]
pub(crate) fn times_derivatives<F: Float, NB: Size>(
    slopes: Pair,
    capped: Pair,
    scoring: &Scoring<F, NB>,
    known: &Known,
    first_column: i32,
    at: u32,
    #[comptime] pair: usize,
    #[comptime] kind: FragmentKind,
) -> Pair {
    let (first, second) = places(known, first_column, at, pair, kind);
    let (tables, code) = (&scoring.tables, comptime!(kind.score.score_mod));
    Pair {
        first: slopes.first * derivative_of_change(capped.first, first, tables, code),
        second: slopes.second * derivative_of_change(capped.second, second, tables, code),
    }
}
