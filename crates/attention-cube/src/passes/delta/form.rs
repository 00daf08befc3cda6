//! How the terms of a backward have a query's logsumexp.

use crate::AttentionProblem;
use crate::arguments::score_kind;
use crate::math::score::ScoreKind;

/// Scales within which scores can stay unscaled until the exponential: beyond, f32 could overflow.
const RAW_SCALES: std::ops::Range<f64> = 1e-30..1e30;

/// How the terms have a query's logsumexp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LogsumexpForm {
    /// One number: no score is far from 0.
    Whole,
    /// One number, but a mark where the reference is [`FAR`].
    Marked,
    /// A reference and a logarithm.
    Apart,
}

impl LogsumexpForm {
    /// The form for scores of a kind, which are `raw` if their dots wait for the scale. No score is far from 0 below a softcap that is not
    /// wide, unless a bias is added.
    pub(crate) const fn of(raw: bool, score: ScoreKind) -> Self {
        match score.softcap && !score.wide_softcap && !score.bias {
            true => Self::Whole,
            false if raw => Self::Marked,
            false => Self::Apart,
        }
    }

    /// The form for kernels on fragments.
    pub(crate) fn of_problem(problem: &AttentionProblem) -> Self {
        Self::of(is_raw(problem), score_kind(problem))
    }
}

/// Whether kernels on fragments keep dots unscaled until the exponential.
pub(crate) fn is_raw(problem: &AttentionProblem) -> bool {
    let has_dots = problem.softcap.is_none() && problem.bias.is_none();
    has_dots && RAW_SCALES.contains(&problem.scale)
}
