//! How the next token is drawn from the logits: the options, and what of them makes sense.

#[cfg(feature = "cube")]
pub(crate) mod device;
pub(crate) mod sampler;

use crate::Gemma4Error;

/// How tokens are drawn: [`greedy`](Self::greedy), or at random. In the order of transformers' logits
/// processors: the repetition penalty and the suppressed tokens, which greedy decoding obeys, too; then
/// temperature, top-k, top-p, min-p.
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
    /// Logits are divided by it: below 1, likely tokens become likelier. 0 is greedy.
    pub temperature: f32,
    /// Only so many of the likeliest tokens are drawn, and those that tie with the last of them.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens whose probabilities sum up to it are drawn.
    pub top_p: Option<f32>,
    /// Only tokens at least this likely are drawn, as a share of the likeliest one's probability.
    pub min_p: Option<f32>,
    /// Logits of tokens that are in the text already, its prompt included, are divided by it where they are
    /// positive, and multiplied where they are negative: above 1, repetition is less likely. 1 changes nothing.
    pub repetition_penalty: f32,
    /// Tokens that are never drawn. Those that the vocabulary lacks are none to suppress.
    pub suppress_tokens: Vec<u32>,
    /// The same seed draws the same tokens from the same logits at the same positions; without one, every run draws others. In a batch,
    /// the first sequence draws from this seed, the second from the next number, and so on.
    pub seed: Option<u64>,
}

impl Sampling {
    /// The likeliest token, always.
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

    /// Whether only the likeliest token can be drawn, of those that the penalty and the suppressed tokens leave.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == Some(1)
    }

    /// Whether the token with the largest logit is always drawn, so that nothing else of the logits matters.
    pub(crate) fn takes_the_largest(&self) -> bool {
        self.is_greedy() && !self.changes_logits()
    }

    /// What logits are divided or multiplied by. Devices without subnormal numbers take smaller ones for 0.
    fn penalty(&self) -> f32 {
        self.repetition_penalty.max(f32::MIN_POSITIVE)
    }

    fn changes_logits(&self) -> bool {
        self.repetition_penalty != 1.0 || !self.suppress_tokens.is_empty()
    }

    /// Whether the numbers make sense.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] for a temperature that is negative or not finite, a `top_k` of 0, a `top_p`
    /// that is not above 0 and at most 1, a `min_p` that is not from 0 to 1, and a repetition penalty that is not
    /// above 0 and finite.
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
    fn numbers_that_make_no_sense_are_refused() {
        for (wrong, argument) in [
            (sampling(-1.0, None, None), "temperature"),
            (sampling(f32::NAN, None, None), "temperature"),
            (sampling(f32::INFINITY, None, None), "temperature"),
            (sampling(1.0, Some(0), None), "top_k"),
            (sampling(1.0, None, Some(0.0)), "top_p"),
            (sampling(1.0, None, Some(1.5)), "top_p"),
            (sampling(1.0, None, Some(f32::NAN)), "top_p"),
        ] {
            let error = wrong.validate().expect_err("refused").to_string();
            assert!(error.starts_with(argument), "{error}");
        }
        for right in [Sampling::greedy(), sampling(2.0, Some(64), Some(1.0))] {
            assert!(right.validate().is_ok(), "{right:?}");
        }
    }
}
