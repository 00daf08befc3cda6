//! Measures prompts that run in one forward pass (packed prompts) against the same prompts one after another. The times
//! end when the first tokens are on the host and the sequences have joined a batch, as in the server.

use attention_workspace::Error;
use burn_gemma4::{Batch, CacheKind, Gemma4Model, Prefill, PromptGraphs, RowChoice};
use std::{fmt, time::Instant};

/// The times of several prompts of equal length, in milliseconds.
pub struct PackedTimes {
    prompts: usize,
    length: usize,
    /// The time of the prompts one after another. Each prompt may replay a CUDA graph.
    alone: f64,
    /// The time of all prompts in one pass, until the first tokens are on the host.
    pass: f64,
    /// The time to add the sequences of the packed prompts to the batch.
    join: f64,
}

impl fmt::Display for PackedTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |milliseconds: f64| (self.prompts * self.length) as f64 / milliseconds * 1e3;
        let packed = self.pass + self.join;
        write!(
            f,
            "{} prompts of {} tokens: one after another {:.2} ms ({:.0} tokens/s); packed {packed:.2} ms \
             ({:.0} tokens/s), of which {:.2} ms join the batch; {:.2} times as fast",
            self.prompts,
            self.length,
            self.alone,
            rate(self.alone),
            rate(packed),
            self.join,
            self.alone / packed
        )
    }
}

/// Measures `prompts` prompts of `length` tokens. Reports the fastest of `rounds` rounds, after two rounds that compile
/// and tune kernels and capture the graphs of the prompts.
///
/// # Errors
/// Returns an error if the prompts do not fit the model, or if the device failed.
pub fn measure(
    model: &Gemma4Model,
    kind: CacheKind,
    prompts: usize,
    length: usize,
    rounds: usize,
) -> Result<PackedTimes, Error> {
    let vocabulary = model.config().vocab_size;
    let prompt = |number: usize| -> Vec<u32> {
        let tokens = number * length..(number + 1) * length;
        tokens
            .map(|index| (index * 7919 % vocabulary) as u32)
            .collect()
    };
    let graphs = PromptGraphs::new(model.clone());
    let mut batch = Batch::new(model, kind)?;
    let prefills = || -> Result<Vec<Prefill>, Error> {
        let prefills = (0..prompts).map(|number| graphs.prefill(prompt(number), kind));
        Ok(prefills.collect::<Result<_, _>>()?)
    };
    let mut fastest = PackedTimes {
        prompts,
        length,
        alone: f64::INFINITY,
        pass: f64::INFINITY,
        join: f64::INFINITY,
    };
    for round in 0..rounds + 2 {
        batch.expect(prompts);
        let device = model.device();
        device.sync()?;
        let start = Instant::now();
        for mut prefill in prefills()? {
            let logits = prefill
                .advance(length)?
                .ok_or("the whole prompt was read")?;
            logits.choose(&[RowChoice::Argmax])?;
            batch.join(&prefill)?;
        }
        device.sync()?;
        let alone = milliseconds(start);
        leave(&mut batch);

        let start = Instant::now();
        let mut pack = prefills()?;
        let logits = Prefill::read_packed(&mut pack.iter_mut().collect::<Vec<_>>())?;
        logits.choose(&vec![RowChoice::Argmax; prompts])?;
        let pass = milliseconds(start);
        let start = Instant::now();
        batch.join_all(&pack.iter().collect::<Vec<_>>())?;
        device.sync()?;
        let join = milliseconds(start);
        leave(&mut batch);
        if round >= 2 {
            fastest.alone = fastest.alone.min(alone);
            if pass + join < fastest.pass + fastest.join {
                (fastest.pass, fastest.join) = (pass, join);
            }
        }
    }
    Ok(fastest)
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Removes all sequences from the batch, which keeps its buffers.
fn leave(batch: &mut Batch) {
    while !batch.is_empty() {
        batch.leave(batch.len() - 1);
    }
}
