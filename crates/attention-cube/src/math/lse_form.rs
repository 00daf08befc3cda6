//! The form in which the LSE/delta tensor stores the logsumexp of a query for the backward pass.

use crate::math::softcap;
use crate::problem::AttentionProblem;

/// The range of attention scales (factors of `q·k`) for which kernels can keep `q·k` unscaled until the exponential.
/// With a scale in this range, these kernels cause no overflow or underflow in f32.
const RAW_SCALES: std::ops::Range<f64> = 1e-30..1e30;

/// The form in which the LSE/delta tensor stores the logsumexp of a query. A logsumexp is the sum of two numbers: the
/// reference score and the logarithm of row_sum. The softmax subtracts the reference score from all scores. The
/// reference score is near the row maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum LogsumexpForm {
    /// The logsumexp as one f32. All scores must be near 0, because an f32 rounds large logsumexps too coarsely.
    Whole,
    /// The logsumexp as one f32, if the reference score is near 0. Otherwise the f32 is a marker value, and two other
    /// rows of the tensor store the reference score and the logarithm.
    Marked,
    /// The reference score and the logarithm as two f32 values, in two rows of the tensor.
    Apart,
}

impl LogsumexpForm {
    /// Returns the form in which the LSE/delta tensor stores the logsumexp. `raw` is true if kernels keep `q·k` unscaled
    /// until the exponential. `is_bounded` is true if a softcap keeps the scores near 0.
    pub(crate) const fn of(raw: bool, is_bounded: bool) -> Self {
        match is_bounded {
            true => Self::Whole,
            false if raw => Self::Marked,
            false => Self::Apart,
        }
    }

    /// Returns the form in which tensor-core kernels store the logsumexp for this problem.
    pub(crate) fn of_problem(problem: &AttentionProblem) -> Self {
        let is_bounded = is_bounded(
            problem.softcap.is_some(),
            softcap::is_wide(problem.softcap),
            problem.bias.is_some() || problem.score_mod.is_some(),
        );
        Self::of(is_raw(problem), is_bounded)
    }
}

/// True if a softcap keeps the scores near 0. The result is false for a wide softcap, which allows large scores. It is also
/// false if a bias or a score mod changes the scores after the softcap (`has_shift`).
pub(crate) const fn is_bounded(has_softcap: bool, is_wide: bool, has_shift: bool) -> bool {
    has_softcap && !is_wide && !has_shift
}

/// True if tensor-core kernels keep `q·k` unscaled until the exponential.
pub(crate) fn is_raw(problem: &AttentionProblem) -> bool {
    let has_only_scale = problem.softcap.is_none() && problem.bias.is_none() && !problem.has_code();
    has_only_scale && RAW_SCALES.contains(&problem.scale)
}
