//! Computes the gradient with respect to a score, from the score and the gradient with respect to its probability.

use super::dropout::kernel::keep_factor;
use super::score::{ScoreIndex, ScoreKind, Scoring, biased, capped, probability, slope};
use cubecl::prelude::*;

/// The factor by which P is multiplied before it is rounded to f16. The gradient of the values is later divided by this factor.
/// With many keys or a large sink, P falls below 2^-14, where f16 loses bits. Multiplied by 2^12, P keeps all bits from 2^-26
/// on. Rounding of large scores may push P above 1, but P times 2^12 still fits f16.
pub(crate) const F16_P_SCALE: f32 = 4096.0;

/// The two-part LSE and the delta of a query, read from the LSE/delta tensor `[batch, q_heads, 5, padded q_len]`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowLseDelta {
    pub reference: f32,
    pub delta: f32,
    /// The natural logarithm of the softmax sum relative to `reference`.
    pub logarithm: f32,
}

/// The derivatives of the loss with respect to one score.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ScoreGradient {
    /// The probability P, after dropout and times the factor of kept probabilities.
    pub p: f32,
    /// `d loss / d score`, after softcap and bias. This is also the gradient of the bias.
    pub ds: f32,
    /// `d loss / d (q·k)`. If `scaled` is false, the factor `scale` is left out.
    pub ddot: f32,
}

/// Returns the derivatives at a visible score. At a hidden score it returns zeros, even if `dot`, `dp` or the row's LSE is NaN.
///
/// Pass `scaled = false` if the caller rounds the result to half precision. The result then leaves out the scale of the scores,
/// because the product with the scale might underflow.
#[cube]
pub(crate) fn score_gradient<M: Numeric, F: Float>(
    dot: f32,
    dp: f32,
    lse_delta: RowLseDelta,
    visible: bool,
    scoring: &Scoring<M, F>,
    place: &ScoreIndex,
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
        p = probability(score, lse_delta.reference, lse_delta.logarithm);
        if p != 0.0f32 {
            if comptime!(kind.dropout) {
                let (query, key) = (place.query as u32, place.key as u32);
                let keep = keep_factor(&scoring.dropout, place.batch, place.head, query, key);
                ds = p * (dp * keep - lse_delta.delta);
                p *= keep;
            } else {
                ds = p * (dp - lse_delta.delta);
            }
            ddot = ds * slope(capped, arguments, kind, scaled);
        }
    }
    ScoreGradient { p, ds, ddot }
}
