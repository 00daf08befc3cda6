//! How a benchmark's tokens are chosen.

use attention_workspace::Error;
use burn_gemma4::{Decoder, Next, Sampler, Sampling};

/// How tokens are chosen.
pub(crate) struct Choice {
    /// One a sequence; none where the likeliest are taken.
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

    /// The next tokens after those that are read, on the host.
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
        let next = next.ok_or("no logit is a number")?;
        for (sampler, token) in self.samplers.iter_mut().zip(&next) {
            sampler.read(&[*token]);
        }
        Ok(next)
    }

    /// The next tokens, on the host.
    pub(crate) fn of(&mut self, next: Next<'_>) -> Result<Vec<u32>, Error> {
        Ok(match self.samplers.is_empty() {
            true => next.argmax()?,
            false => next.sample(&mut self.samplers)?,
        })
    }
}
