//! Decoding with guesses of which a given share is right, whatever the model says: what a pass with them costs, and what it gives.

use crate::launches::{Launches, observe};
use attention_workspace::Error;
use burn_gemma4::{Cache, Drafter, Gemma4Model, GuessedTokens};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;
use std::time::Instant;

/// Which guesses there are.
#[derive(Clone, Copy, Debug)]
pub struct Forced {
    /// Tokens guessed for a pass.
    pub tokens: usize,
    /// The probability that one is right where those before it are.
    pub acceptance: f64,
}

/// How it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Measuring {
    /// Passes that count.
    pub passes: usize,
    pub launch_each: bool,
    /// Whether to tell what a pass launches.
    pub launches: bool,
}

/// What was measured.
#[derive(Serialize)]
pub struct Drafted {
    /// Tokens guessed for a pass.
    pub tokens: usize,
    /// Of the guesses, with a drafter whose head and layers are computed; else they cost nothing.
    pub by_drafter: bool,
    /// The share of guesses that counted as right, of those that came after no wrong one.
    pub acceptance: f64,
    /// Tokens that a pass gave.
    pub tokens_per_pass: f64,
    /// From one pass to the next, guesses included.
    pub pass_milliseconds: f64,
    /// The guesses by themselves, where the host waits for them as it does not in a pass.
    pub guess_milliseconds: f64,
    /// Generated tokens a second.
    pub decode_rate: f64,
    /// How the decoder computed.
    pub mode: String,
    /// What a pass launches one by one, guesses included.
    pub launches: Option<Launches>,
}

impl std::fmt::Display for Drafted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} guessed {}, {:.0} % right: {:.1} t/s, {:.2} tokens a pass of {:.3} ms, guesses alone {:.3} ms, {}",
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

/// Goes on after `token`, which comes after what `cache` holds, for passes that count and a few that do not.
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
    let (mut streams, mut row) = (next.hidden().ok_or("a step leaves a stream")?, 0);
    let mut token = next.argmax()?[0];
    // Which are right is the same in every run.
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
        streams = next.hidden().ok_or("a pass leaves a stream")?;
        let chosen = next.argmax()?;
        guesses.map(GuessedTokens::tokens).transpose()?;
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
