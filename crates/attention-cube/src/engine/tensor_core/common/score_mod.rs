//! Applies the user's score mod and mask mod to the scores of a fragment.

use super::bias::with_bias;
use super::scoring::Scoring;
use super::{FragmentKind, Known, RowPair, known, own_column};
use crate::math::score_mod::kernel::{changed_score, derivative_of_change, shown_score};
use crate::math::score_mod::{FloatForm, ScorePlace};
use crate::math::side::Side;
use cube_kit::nvidia::accumulator::{Pair, column, is_second};
use cubecl::prelude::*;

/// Returns the distance from a key to a query's own position, for the thread's first column of a fragment and one of the
/// thread's rows. `row` is the position of the row.
#[cube]
fn first_distance(known: &Known, row: i32, first_column: i32, #[comptime] side: Side) -> i32 {
    let offset = known.rows.seq_info.offset;
    let first_column = own_column(first_column, 0usize);
    if comptime!(side == Side::Queries) {
        row + offset - first_column
    } else {
        first_column + offset - row
    }
}

/// Returns the difference between the distance of a fragment's column and the distance of the first column.
const fn distance_step(column: usize, side: Side) -> i32 {
    match side {
        Side::Queries => -(column as i32),
        Side::Keys => column as i32,
    }
}

/// True only if, in each lane of the warp, no two distances between keys and queries of the fragment have opposite
/// signs. The fragment has `columns` columns. All lanes get the same result.
#[cube]
pub(crate) fn is_one_sided<F: Float, NB: Size>(
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    first_column: i32,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> bool {
    let known = known::<F, NB>(rows, scoring, kind);
    let first_0 = first_distance(&known, rows.position_0, first_column, kind.side);
    let first_1 = first_distance(&known, rows.position_1, first_column, kind.side);
    let step = comptime!(distance_step(columns, kind.side));
    let least = min(min(first_0, first_1), min(first_0, first_1) + step);
    let most = max(max(first_0, first_1), max(first_0, first_1) + step);
    plane_all(least >= 0i32 || most <= 0i32)
}

/// Returns the query and key positions of the two scores of the `pair`-th register pair. The block of scores begins at
/// column `first_column`. `at` is the pair's first column. If the pair lies past the problem's last column, `at` is
/// instead the first column of the problem's last pair.
///
/// The result also holds the distance between query and key as f32. To compute this distance, the kernel converts one
/// integer per row to f32, and adds one constant per column. If `one_sided` is true, the fragment must satisfy
/// [`is_one_sided`].
#[cube]
fn places(
    known: &Known,
    first_column: i32,
    at: u32,
    #[comptime] pair: usize,
    #[comptime] one_sided: bool,
    #[comptime] kind: FragmentKind,
) -> (ScorePlace, ScorePlace) {
    let rows = known.rows;
    let offset = rows.seq_info.offset;
    let at = at as i32;
    let mut head = rows.head_0;
    let mut row = rows.position_0;
    if comptime!(is_second(2 * pair)) {
        head = rows.head_1;
        row = rows.position_1;
    }
    let distance = first_distance(known, row, first_column, kind.side);
    let float_base = f32::cast_from(distance);
    // A distance of 0 has any sign. If the first distance is 0, the sign is that of the next columns.
    let sign = comptime!(distance_step(1, kind.side));
    let direction = select(distance * 2i32 + sign >= 0i32, 1.0f32, -1.0f32);
    let first_form = comptime!(float_form(column(2 * pair), one_sided, kind.side));
    let second_form = comptime!(float_form(column(2 * pair) + 1, one_sided, kind.side));
    if comptime!(kind.side == Side::Queries) {
        let first = ScorePlace::new(rows.batch, head, row, at, offset);
        let second = ScorePlace::new(rows.batch, head, row, at + 1i32, offset);
        (
            first.with_float_distance(float_base, direction, first_form),
            second.with_float_distance(float_base, direction, second_form),
        )
    } else {
        let first = ScorePlace::new(rows.batch, head, at, row, offset);
        let second = ScorePlace::new(rows.batch, head, at + 1i32, row, offset);
        (
            first.with_float_distance(float_base, direction, first_form),
            second.with_float_distance(float_base, direction, second_form),
        )
    }
}

/// Returns the form of the distance of a fragment's column, relative to the thread's first column.
const fn float_form(column: usize, one_sided: bool, side: Side) -> FloatForm {
    let step = distance_step(column, side);
    if one_sided {
        FloatForm::OneSided(step)
    } else {
        FloatForm::Known(step)
    }
}

/// Returns the two scores of the `pair`-th register pair after score mod, bias and mask mod. `capped` holds the scores
/// before these three steps. If `one_sided` is true, the fragment must satisfy [`is_one_sided`].
#[cube]
pub(crate) fn final_scores<F: Float, NB: Size>(
    capped: Pair,
    scoring: &Scoring<F, NB>,
    known: &Known,
    first_column: i32,
    at: u32,
    #[comptime] pair: usize,
    #[comptime] one_sided: bool,
    #[comptime] kind: FragmentKind,
) -> Pair {
    let hidden = scoring.arguments.negative_infinity;
    let mut scores = capped;
    if comptime!(kind.score.score_mod.is_some()) {
        let (first, second) = places(known, first_column, at, pair, one_sided, kind);
        let tables = &scoring.tables;
        scores = Pair {
            first: changed_score(scores.first, first, tables, kind.score.score_mod),
            second: changed_score(scores.second, second, tables, kind.score.score_mod),
        };
    }
    scores = with_bias::<F, NB>(scores, &scoring.bias, known, at, hidden, pair, kind);
    if comptime!(kind.score.mask_mod.is_some()) {
        let (first, second) = places(known, first_column, at, pair, one_sided, kind);
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
    let (first, second) = places(known, first_column, at, pair, false, kind);
    let (tables, code) = (&scoring.tables, comptime!(kind.score.score_mod));
    Pair {
        first: slopes.first * derivative_of_change(capped.first, first, tables, code),
        second: slopes.second * derivative_of_change(capped.second, second, tables, code),
    }
}
