//! How likely tokens were.

use serde::Serialize;
use std::cmp::Ordering;

/// How likely a generated token was, and which tokens were likeliest in its place.
///
/// Logarithms of the model's own probabilities, the softmax of its logits: before temperature, penalty, suppressed
/// tokens and what else a [`Sampling`](crate::Sampling) makes of them. A token that it suppresses may be among them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenLogprobs {
    /// Of the generated token.
    pub logprob: f32,
    /// The likeliest tokens with theirs, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Of `token` and the `count` likeliest tokens. Logits that are NaN count as −∞.
    pub(crate) fn of(logits: &[f32], token: u32, count: usize) -> Self {
        let number = |logit: f32| match logit.is_nan() {
            true => f32::NEG_INFINITY,
            false => logit,
        };
        let largest = logits
            .iter()
            .copied()
            .map(number)
            .fold(f32::NEG_INFINITY, f32::max);
        // Apart, because ∞ - ∞ is NaN.
        let below = |logit: f32| match number(logit) {
            logit if logit == largest => 0.0,
            logit => f64::from(logit) - f64::from(largest),
        };
        let sum: f64 = logits.iter().map(|logit| below(*logit).exp()).sum();
        let logprob = |logit: f32| (below(logit) - sum.ln()) as f32;

        let mut order: Vec<u32> = (0u32..).zip(logits).map(|(token, _)| token).collect();
        let by_logit = |a: &u32, b: &u32| -> Ordering {
            let [first, second] = [a, b].map(|token| number(logits[*token as usize]));
            second.total_cmp(&first).then(a.cmp(b))
        };
        if count < order.len() {
            order.select_nth_unstable_by(count, by_logit);
            order.truncate(count);
        }
        order.sort_unstable_by(by_logit);
        Self {
            logprob: logprob(logits[token as usize]),
            top: order
                .into_iter()
                .map(|token| (token, logprob(logits[token as usize])))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_of_the_softmax() {
        let logits = [0.1f32, 0.4, 0.2, 0.3].map(|p| p.ln() + 7.0);
        let found = TokenLogprobs::of(&logits, 0, 2);
        assert!((found.logprob - 0.1f32.ln()).abs() < 1e-6, "{found:?}");
        let [(1, first), (3, second)] = found.top[..] else {
            panic!("{found:?}");
        };
        assert!((first - 0.4f32.ln()).abs() < 1e-6, "{found:?}");
        assert!((second - 0.3f32.ln()).abs() < 1e-6, "{found:?}");
        assert!(TokenLogprobs::of(&logits, 0, 0).top.is_empty());
        assert_eq!(TokenLogprobs::of(&logits, 0, 9).top.len(), 4);
    }

    #[test]
    fn what_is_no_number_is_impossible() {
        let logits = [f32::NAN, f32::INFINITY, 0.0, f32::INFINITY];
        let found = TokenLogprobs::of(&logits, 0, 3);
        assert_eq!(found.logprob, f32::NEG_INFINITY);
        let half = 0.5f32.ln();
        assert_eq!(found.top, [(1, half), (3, half), (2, f32::NEG_INFINITY)]);
    }
}
