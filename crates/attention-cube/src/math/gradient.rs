//! Computes the gradient with respect to a score. The inputs are the score, and the gradient with respect to the
//! score's probability.

use super::dropout::kernel::keep_factor;
use super::score::{ScoreKind, Scoring, capped, final_score, final_slope, probability};
use super::score_mod::ScorePlace;
use cubecl::prelude::*;

/// Kernels multiply P (the probabilities) by this factor before they round P to f16, and later divide the gradient of V by
/// the factor. Below 2^-14, f16 loses bits of P. With the factor 2^12, P keeps all bits down to 2^-26, and still fits f16.
pub(crate) const F16_P_SCALE: f32 = 4096.0;

/// The LSE and the delta of a query. The LSE is stored as two numbers, `reference` and `logarithm`. `reference` is the
/// number that the softmax subtracts from each of the query's scores. It is at or near the row maximum.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowLseDelta {
    pub reference: f32,
    pub delta: f32,
    /// The natural logarithm of row_sum. row_sum is the sum of the exponentials of the query's scores, after
    /// `reference` is subtracted from each score.
    pub logarithm: f32,
}

/// The probability of one score, and the derivatives of the loss with respect to this score.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ScoreGradient {
    /// The probability P after dropout, multiplied by the factor that dropout applies to kept probabilities.
    pub p: f32,
    /// The derivative `d loss / d score`, for the score after softcap and bias. The derivative is also this score's
    /// contribution to the gradient of the bias.
    pub ds: f32,
    /// The derivative `d loss / d (q·k)`. If the argument `scaled` of the function `score_gradient` is false, the
    /// derivative lacks the factor `scale`.
    pub ddot: f32,
}

/// Returns the probability of a score, and the derivatives of the loss with respect to the score. If the score is
/// hidden (`visible` is false), the function returns zeros, even if an argument is NaN.
///
/// Pass `scaled = false` if the caller rounds `ddot` to half precision. The function then does not multiply `ddot` by
/// the scale of the scores, because the product might underflow in half precision.
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
