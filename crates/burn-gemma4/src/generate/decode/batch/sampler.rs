//! The choice of the next tokens of a batch within the captured decode step: by argmax, or by one sampler for all rows.

use crate::generate::decode::graph::GraphCapture;
use crate::generate::decode::row_logits::RowChoice;
use crate::generate::sampling::device::DeviceSampler;
use crate::generate::sampling::sampler::Sampler;
use crate::model::Gemma4Model;

/// The number of steps with the same sampling options before the captured decode step draws with these options. A
/// capture takes as long as about twenty steps.
const STEPS_BEFORE: usize = 8;

/// Lets the captured decode step of a batch draw the next tokens. All rows must have the same sampling options, but each
/// row has a seed of its own.
#[derive(Debug, Default)]
pub(super) struct BatchSampler {
    /// A sampler with the options of the last steps.
    options: Option<Sampler>,
    /// The number of steps with these options.
    steps: usize,
    /// The seeds of the rows on the device.
    seeds: Vec<u64>,
}

/// The same choice of the next token for all sequences of a batch.
pub(super) enum SameChoice<'a> {
    Argmax,
    /// A draw by the sampler of each sequence. The samplers have the same options.
    Draw(Vec<&'a Sampler>),
}

impl BatchSampler {
    /// Prepares the graph for the choice of the next tokens. Returns true if the captured step draws the tokens, and
    /// false if it takes the argmax of each row. Returns `None` if the tokens must be chosen after the step.
    ///
    /// `rows` has the buffer row of each sequence. The batch has `count` buffer rows.
    pub fn prepare(
        &mut self,
        model: &Gemma4Model,
        graph: &mut GraphCapture,
        choice: SameChoice<'_>,
        rows: &[usize],
        count: usize,
    ) -> Option<bool> {
        let SameChoice::Draw(samplers) = choice else {
            return Some(false);
        };
        let first = *samplers.first()?;
        let options = self.options.as_ref();
        if !options.is_some_and(|options| options.draws_like(first)) {
            self.options = Some(first.clone());
            self.steps = 0;
            graph.set_sampler(None);
        }
        self.steps += 1;
        if self.steps <= STEPS_BEFORE {
            return None;
        }
        let mut seeds = vec![0; count];
        for (sampler, row) in samplers.iter().zip(rows) {
            seeds[*row] = sampler.seed();
        }
        match graph.sampler() {
            Some(_) if self.seeds == seeds => (),
            Some(sampler) if self.seeds.len() == seeds.len() => {
                sampler.overwrite_seeds(&seeds);
                graph.discard_lookahead();
                self.seeds = seeds;
            }
            _ => {
                let of_rows = vec![first; count];
                let (vocabulary, device) = (model.config().vocab_size, model.device());
                let sampler = DeviceSampler::new(&of_rows, vocabulary, model.dtype(), &device)?;
                sampler.overwrite_seeds(&seeds);
                graph.set_sampler(Some(sampler));
                self.seeds = seeds;
            }
        }
        Some(true)
    }
}

/// Returns the choice of all sequences. Returns `None` if their choices differ, or if the sampling options depend on the
/// text, as penalties do. `lengths` gives the number of tokens of each sequence in the KV cache.
pub(super) fn same_choice<'a>(
    choices: &[RowChoice<'a>],
    lengths: impl FnOnce() -> Vec<usize>,
) -> Option<SameChoice<'a>> {
    let samplers = choices.iter().map(|choice| match choice {
        RowChoice::Draw(sampler) => Some(*sampler),
        RowChoice::Argmax | RowChoice::Logits => None,
    });
    let Some(samplers) = samplers.collect::<Option<Vec<_>>>() else {
        let is_argmax = |choice: &RowChoice<'_>| matches!(choice, RowChoice::Argmax);
        return choices.iter().all(is_argmax).then_some(SameChoice::Argmax);
    };
    let first = *samplers.first()?;
    // The captured step draws at the position that follows the cached tokens and the step's input token. A sampler that
    // has not recorded all these tokens draws at another position, with other random bits.
    let serves = |(sampler, length): (&&Sampler, usize)| {
        sampler.draws_like(first)
            && sampler.position() == length + 1
            && !sampler.sampling().changes_logits()
            && !sampler.suppresses_now()
    };
    let all = samplers.iter().zip(lengths()).all(serves);
    all.then_some(SameChoice::Draw(samplers))
}
