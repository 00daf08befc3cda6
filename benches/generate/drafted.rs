//! Measures speculative decoding at a forced acceptance rate. A pass is one forward of the target model over the last token
//! and the draft tokens after it.

use crate::launches::{Launches, observe};
use attention_workspace::Error;
use burn_gemma4::{Cache, DraftTokens, Drafter, Gemma4Model};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;
use std::time::Instant;

/// The number of draft tokens, and the acceptance rate that the benchmark forces on them.
#[derive(Clone, Copy, Debug)]
pub struct Forced {
    /// The number of draft tokens per pass.
    pub tokens: usize,
    /// The probability that a draft token is accepted if all draft tokens before it are accepted.
    pub acceptance: f64,
}

/// The settings of the measurement of speculative decoding.
#[derive(Clone, Copy, Debug)]
pub struct Measuring {
    /// The number of timed passes.
    pub passes: usize,
    pub launch_each: bool,
    /// True if the report lists the kernel launches of a pass.
    pub launches: bool,
}

/// The results of speculative decoding.
#[derive(Serialize)]
pub struct Drafted {
    /// The number of draft tokens per pass.
    pub tokens: usize,
    /// True if a drafter model computes the draft tokens. If false, the draft tokens are arbitrary and cost no time.
    pub by_drafter: bool,
    /// The number of accepted draft tokens divided by the number of compared draft tokens. A pass compares its draft
    /// tokens with the target model's tokens one by one, up to the first rejected draft token.
    pub acceptance: f64,
    /// The mean number of tokens that a pass generates.
    pub tokens_per_pass: f64,
    /// The time of a pass, including the computation of its draft tokens.
    pub pass_milliseconds: f64,
    /// The time to compute the draft tokens of a pass. This time comes from a separate measurement, in which the host
    /// waits for the draft tokens. In a timed pass, the host does not wait for the draft tokens.
    pub guess_milliseconds: f64,
    /// The number of generated tokens per second.
    pub decode_rate: f64,
    /// The decoder's execution mode: `graph` (CUDA graph), `kernels` (one launch per kernel) or `layers`
    /// (`Gemma4Model::step`).
    pub mode: String,
    /// The kernel launches of a pass, including those that compute its draft tokens. Graph capture is off while the
    /// launches are recorded.
    pub launches: Option<Launches>,
}

impl std::fmt::Display for Drafted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} drafted {}, {:.0} % accepted: {:.1} t/s, {:.2} tokens a pass of {:.3} ms, drafts alone {:.3} ms, {}",
            self.tokens,
            if self.by_drafter {
                "by a drafter"
            } else {
                "for nothing"
            },
            100.0 * self.acceptance,
            self.decode_rate,
            self.tokens_per_pass,
            self.pass_milliseconds,
            self.guess_milliseconds,
            self.mode,
        )?;
        match &self.launches {
            Some(launches) => write!(f, "\n      {launches}"),
            None => Ok(()),
        }
    }
}

/// Continues the sequence in `cache` with `token`, and measures speculative decoding after some warm-up passes.
pub fn measure(
    model: &Gemma4Model,
    drafter: Option<&Drafter>,
    cache: &mut Cache,
    token: u32,
    forced: Forced,
    measuring: Measuring,
) -> Result<Drafted, Error> {
    let mut decoder = model.decoder(cache);
    let passes = measuring.passes;
    if measuring.launch_each {
        decoder = decoder.without_graph_capture();
    }
    if let Some(drafter) = drafter {
        decoder = decoder.with_drafter(drafter)?;
    }
    let next = decoder.step(&[token])?;
    let (mut streams, mut row) = (next.hidden().ok_or("a step returns hidden states")?, 0);
    let mut token = next.argmax()?[0];
    // The fixed seed makes every run accept the same draft tokens.
    let mut random = StdRng::seed_from_u64(1);
    let warm_up = passes.div_ceil(8).max(6);
    let mut seconds = 0.0;
    let (mut right_in_all, mut looked_at, mut counted) = (0, 0, 0);
    for pass in 0..warm_up + passes {
        let start = Instant::now();
        let (guesses, next) = match drafter {
            Some(_) => {
                let read = decoder.guess_and_read(token, streams, row, forced.tokens)?;
                (Some(read.0), read.1)
            }
            None => (None, decoder.read(&vec![token; 1 + forced.tokens])?),
        };
        streams = next.hidden().ok_or("a pass returns hidden states")?;
        let chosen = next.argmax()?;
        guesses.map(DraftTokens::tokens).transpose()?;
        let is_right = |_: &usize| random.random::<f64>() < forced.acceptance;
        let right = (0..forced.tokens).take_while(is_right).count();
        decoder.forget(forced.tokens - right)?;
        row = right;
        token = chosen[right];
        if pass >= warm_up {
            seconds += start.elapsed().as_secs_f64();
            right_in_all += right;
            looked_at += (right + 1).min(forced.tokens);
            counted += 1 + right;
        }
    }
    let mut of_guesses = 0.0;
    if drafter.is_some() {
        let hidden = streams.clone().narrow(0, row, 1);
        for pass in 0..warm_up + passes {
            let start = Instant::now();
            let guesses = decoder.guess(token, hidden.clone(), forced.tokens)?;
            guesses.tokens()?;
            if pass >= warm_up {
                of_guesses += start.elapsed().as_secs_f64();
            }
        }
    }
    let mode = format!("{:?}", decoder.mode()).to_lowercase();
    let launches = match drafter {
        Some(_) if measuring.launches => {
            decoder = decoder.without_graph_capture();
            let observed = observe(|| -> Result<(), Error> {
                let (_, next) = decoder.guess_and_read(token, streams, row, forced.tokens)?;
                next.argmax()?;
                Ok(())
            });
            observed.0?;
            observed.1
        }
        _ => None,
    };
    Ok(Drafted {
        tokens: forced.tokens,
        by_drafter: drafter.is_some(),
        acceptance: right_in_all as f64 / looked_at.max(1) as f64,
        tokens_per_pass: counted as f64 / passes as f64,
        pass_milliseconds: seconds / passes as f64 * 1e3,
        guess_milliseconds: of_guesses / passes as f64 * 1e3,
        decode_rate: counted as f64 / seconds,
        mode,
        launches,
    })
}
