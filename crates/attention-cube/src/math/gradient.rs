//! From a score and the gradient of its probability to the gradient of the score.

use super::score::{Place, ScoreKind, Scoring, biased, capped, probability, slope};
use cubecl::prelude::*;

/// What P is multiplied with before it is rounded to f16, and the values' gradient divided by. A probability below 2^-14, as many keys or
/// a large sink leave, would have fewer bits than the others; by 2^12 those from 2^-26 on have all of theirs, and there is room for what
/// rounding of large scores makes of a probability of 1.
pub(crate) const F16_P_SCALE: f32 = 4096.0;

/// What the backward knows of a query beforehand, in `[batch, q_heads, 4, padded q_len]`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowTerms {
    pub reference: f32,
    pub delta: f32,
    /// Of the sum by the reference.
    pub logarithm: f32,
}

/// The derivatives at one score.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ScoreGradient {
    /// The probability.
    pub p: f32,
    /// `d loss / d score`, after bias and softcap: the bias's gradient.
    pub ds: f32,
    /// `d loss / d (q·k)`, or that without the scale.
    pub ddot: f32,
}

/// The derivatives where the query sees the key; zeros elsewhere, whatever the numbers are. What is rounded to half precision has to be
/// taken without the scale, if not `scaled`: it may make them vanish.
#[cube]
pub(crate) fn score_gradient<M: Numeric, F: Float>(
    dot: f32,
    dp: f32,
    terms: RowTerms,
    visible: bool,
    scoring: &Scoring<'_, '_, '_, M, F>,
    place: &Place,
    #[comptime] kind: ScoreKind,
    #[comptime] scaled: bool,
) -> ScoreGradient {
    let mut p = 0.0f32;
    let mut ds = 0.0f32;
    let mut ddot = 0.0f32;
    if visible {
        let arguments = &scoring.arguments;
        let capped = capped(dot, arguments, kind);
        let score = biased(capped, &scoring.bias, place, arguments.negative_infinity);
        p = probability(score, terms.reference, terms.logarithm);
        if p != 0.0f32 {
            ds = p * (dp - terms.delta);
            ddot = ds * slope(capped, arguments, kind, scaled);
        }
    }
    ScoreGradient { p, ds, ddot }
}
