//! Log-probabilities of generated tokens.

use serde::Serialize;
use std::cmp::Ordering;

/// The log-probability of a generated token, and the most likely tokens at its position.
///
/// Log-probabilities are natural logarithms of the softmax over the model's raw logits. The settings of
/// [`Sampling`](crate::config::sampling::Sampling) are not applied, so suppressed tokens may appear.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenLogprobs {
    /// The log-probability of the generated token at its position.
    pub logprob: f32,
    /// The most likely tokens and their log-probabilities, in descending order of probability.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Computes the log-probabilities of the generated `token` and of the `count` most likely tokens. A NaN logit counts as
    /// −∞.
    ///
    /// # Panics
    /// Panics if `token` is not an index of `logits`.
    pub fn of(logits: &[f32], token: u32, count: usize) -> Self {
        let number = |logit: f32| match logit.is_nan() {
            true => f32::NEG_INFINITY,
            false => logit,
        };
        let largest = logits
            .iter()
            .copied()
            .map(number)
            .fold(f32::NEG_INFINITY, f32::max);
        // Return 0 for the largest logit without a subtraction, because the difference ∞ − ∞ would be NaN if the
        // largest logit is ∞.
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
    fn token_logprobs_are_the_log_softmax() {
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
    fn token_logprobs_with_nan_counts_it_as_minus_infinity() {
        let logits = [f32::NAN, f32::INFINITY, 0.0, f32::INFINITY];
        let found = TokenLogprobs::of(&logits, 0, 3);
        assert_eq!(found.logprob, f32::NEG_INFINITY);
        let half = 0.5f32.ln();
        assert_eq!(found.top, [(1, half), (3, half), (2, f32::NEG_INFINITY)]);
    }
}
