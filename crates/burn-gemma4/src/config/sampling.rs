//! The options by which the next token is sampled, and their validation.

use crate::error::Gemma4Error;

/// The options by which the next token is sampled. Sampling is [`greedy`](Self::greedy) or random.
///
/// The options apply in this order, as in Hugging Face Transformers: repetition penalty, suppressed tokens,
/// temperature, top-k, top-p, min-p. The first two also apply to greedy decoding.
///
/// # Examples
/// ```
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// use burn_gemma4::{Sampler, Sampling};
///
/// let sampling = Sampling {
///     temperature: 0.8,
///     top_k: Some(2),
///     seed: Some(7),
///     ..Sampling::greedy()
/// };
/// sampling.validate()?;
/// let token = Sampler::new(&sampling).sample(&[0.0, 3.0, 2.0])?;
/// assert!(token == 1 || token == 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The number by which the logits are divided. A temperature of 0 means greedy decoding.
    pub temperature: f32,
    /// If set, only the `top_k` tokens with the largest logits can be sampled. If further logits equal the smallest of
    /// these logits, their tokens can also be sampled.
    pub top_k: Option<usize>,
    /// If set, only the most likely tokens can be sampled: the fewest tokens whose probabilities sum to at least `top_p`.
    pub top_p: Option<f32>,
    /// If set, only tokens with at least `min_p` times the probability of the most likely token can be sampled.
    pub min_p: Option<f32>,
    /// The penalty on tokens that the prompt or the generated text already contains. A positive logit is divided by the
    /// penalty, and a negative logit is multiplied by the penalty. A penalty of 1 has no effect.
    pub repetition_penalty: f32,
    /// Tokens that are never sampled. Tokens outside the vocabulary are ignored.
    pub suppress_tokens: Vec<u32>,
    /// The seed of the random numbers. Without a seed, each run draws different random numbers. In a batch the first
    /// sequence has this seed, the second sequence has the seed plus 1, and so on.
    pub seed: Option<u64>,
}

impl Sampling {
    /// Returns greedy sampling, which always takes the token with the largest logit.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: 1.0,
            suppress_tokens: Vec::new(),
            seed: None,
        }
    }

    /// True if the token with the largest logit is always chosen. The repetition penalty and suppressed tokens still
    /// apply.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == Some(1)
    }

    /// True if the token with the largest raw logit is always chosen. The caller then needs only the argmax of the raw logits.
    pub(crate) fn is_argmax(&self) -> bool {
        self.is_greedy() && !self.changes_logits()
    }

    /// Returns the repetition penalty, or the smallest normal f32 if the penalty is subnormal. Some devices would flush a
    /// subnormal penalty to 0.
    pub(crate) fn penalty(&self) -> f32 {
        self.repetition_penalty.max(f32::MIN_POSITIVE)
    }

    pub(crate) fn changes_logits(&self) -> bool {
        self.repetition_penalty != 1.0 || !self.suppress_tokens.is_empty()
    }

    /// Checks that the options are valid.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] in these cases:
    ///
    /// - The temperature is negative or not finite.
    /// - `top_k` is 0, or `top_p` is outside `(0, 1]`, or `min_p` is outside `[0, 1]`.
    /// - The repetition penalty is not positive or not finite.
    pub fn validate(&self) -> Result<(), Gemma4Error> {
        let refuse = |argument, reason| Err(Gemma4Error::Argument { argument, reason });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            let reason = format!("{} is not a finite number from 0", self.temperature);
            return refuse("temperature", reason);
        }
        if self.top_k == Some(0) {
            return refuse("top_k", "0 leaves no token to draw".into());
        }
        if let Some(min_p) = self.min_p
            && !(0.0..=1.0).contains(&min_p)
        {
            return refuse("min_p", format!("{min_p} is not from 0 to 1"));
        }
        let penalty = self.repetition_penalty;
        if !(penalty.is_finite() && penalty > 0.0) {
            let reason = format!("{penalty} is not a finite number above 0");
            return refuse("repetition_penalty", reason);
        }
        match self.top_p {
            Some(top_p) if !(top_p > 0.0 && top_p <= 1.0) => {
                refuse("top_p", format!("{top_p} is not above 0 and at most 1"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32, top_k: Option<usize>, top_p: Option<f32>) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
            seed: Some(1),
            ..Sampling::greedy()
        }
    }

    #[test]
    fn validate_of_invalid_options_fails() {
        for (wrong, argument) in [
            (sampling(-1.0, None, None), "temperature"),
            (sampling(f32::NAN, None, None), "temperature"),
            (sampling(f32::INFINITY, None, None), "temperature"),
            (sampling(1.0, Some(0), None), "top_k"),
            (sampling(1.0, None, Some(0.0)), "top_p"),
            (sampling(1.0, None, Some(1.5)), "top_p"),
            (sampling(1.0, None, Some(f32::NAN)), "top_p"),
        ] {
            let error = wrong
                .validate()
                .expect_err("the options are invalid")
                .to_string();
            assert!(error.starts_with(argument), "{error}");
        }
        for right in [Sampling::greedy(), sampling(2.0, Some(64), Some(1.0))] {
            assert!(right.validate().is_ok(), "{right:?}");
        }
    }
}
