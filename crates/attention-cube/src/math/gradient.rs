//! Computes the gradient with respect to a score, from the score and the gradient with respect to its probability.

use super::dropout::kernel::keep_factor;
use super::score::{ScoreKind, Scoring, capped, final_score, final_slope, probability};
use super::score_mod::ScorePlace;
use cubecl::prelude::*;

/// Kernels multiply P (the probabilities) by this factor before they round P to f16, and later divide the gradient of V by
/// the factor. Below 2^-14, f16 loses bits of P. With the factor 2^12, P keeps all bits down to 2^-26, and still fits f16.
pub(crate) const F16_P_SCALE: f32 = 4096.0;

/// The LSE (as reference score and logarithm) and the delta of a query. The reference score is the number that the
/// softmax subtracts from each score, at or near the row maximum.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowLseDelta {
    pub reference: f32,
    pub delta: f32,
    /// The natural logarithm of row_sum, the sum of the exponentials after `reference` is subtracted from each score.
    pub logarithm: f32,
}

/// The probability of one score, and the derivatives of the loss with respect to this score.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ScoreGradient {
    /// The probability P after dropout, multiplied by the factor that dropout applies to kept probabilities.
    pub p: f32,
    /// The derivative `d loss / d score`, for the score after softcap and bias. This is also the gradient of the bias.
    pub ds: f32,
    /// The derivative `d loss / d (q·k)`. The function `score_gradient` omits the factor `scale` if its argument `scaled` is
    /// false.
    pub ddot: f32,
}

/// Returns the derivatives at a visible score. At a hidden score the function returns zeros, even if an argument is NaN.
///
/// Pass `scaled = false` if the caller rounds the result to half precision. The result is then not multiplied by the scale
/// of the scores, because the product might underflow.
#[cube]
pub(crate) fn score_gradient<M: Numeric, F: Float>(
    dot: f32,
    dp: f32,
    lse_delta: RowLseDelta,
    visible: bool,
    scoring: &Scoring<M, F>,
    place: ScorePlace,
    #[comptime] kind: ScoreKind,
    #[comptime] scaled: bool,
) -> ScoreGradient {
    let mut p = 0.0f32;
    let mut ds = 0.0f32;
    let mut ddot = 0.0f32;
    if visible {
        let capped = capped(dot, &scoring.arguments, kind);
        let score = final_score(capped, scoring, place, kind);
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
            ddot = ds * final_slope(capped, scoring, place, kind, scaled);
        }
    }
    ScoreGradient { p, ds, ddot }
}
