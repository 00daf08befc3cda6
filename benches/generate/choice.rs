//! Chooses the tokens that the benchmark generates, greedily or by sampling.

use attention_workspace::Error;
use burn_gemma4::{Decoder, Next, Sampler, Sampling};

/// The method that chooses the next token of each sequence: greedy decoding or sampling.
pub(crate) struct Choice {
    /// The sampler of each sequence. The list is empty for greedy decoding.
    pub(crate) samplers: Vec<Sampler>,
}

impl Choice {
    pub(crate) fn new(sample: bool, batch: usize) -> Self {
        let sampler = |seed| {
            Sampler::new(&Sampling {
                temperature: 1.0,
                top_k: Some(64),
                top_p: Some(0.95),
                seed: Some(seed),
                ..Sampling::greedy()
            })
        };
        let batch = if sample { batch } else { 0 };
        Self {
            samplers: (0..batch as u64).map(sampler).collect(),
        }
    }

    /// Runs a decode step on `tokens`, and returns the next token of each sequence on the host. If `goes_on` is true,
    /// the caller runs another step afterwards, and the decoder may start that step early.
    pub(crate) fn after(
        &mut self,
        decoder: &mut Decoder<'_>,
        tokens: &[u32],
        goes_on: bool,
    ) -> Result<Vec<u32>, Error> {
        let Some(next) = decoder.follow(tokens, goes_on)? else {
            return self.of(decoder.step(tokens)?);
        };
        let next: Option<Vec<u32>> = next.into_iter().collect();
        let next = next.ok_or("a sequence has no valid logit")?;
        for (sampler, token) in self.samplers.iter_mut().zip(&next) {
            sampler.read(&[*token]);
        }
        Ok(next)
    }

    /// Chooses the next token of each sequence from the logits in `next`, and returns these tokens on the host.
    pub(crate) fn of(&mut self, next: Next<'_>) -> Result<Vec<u32>, Error> {
        Ok(match self.samplers.is_empty() {
            true => next.argmax()?,
            false => next.sample(&mut self.samplers)?,
        })
    }
}
