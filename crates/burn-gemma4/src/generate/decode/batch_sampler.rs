//! The choice of the next tokens of a batch within the captured decode step: by argmax, or by one sampler for all rows.

use super::graph::GraphCapture;
use super::row_logits::RowChoice;
use crate::generate::sampling::device::DeviceSampler;
use crate::generate::sampling::sampler::Sampler;
use crate::model::Gemma4Model;

/// The number of consecutive steps with the same sampling options before the captured decode step draws with these
/// options. A capture takes as long as about twenty steps.
const STEPS_BEFORE: usize = 8;

/// Lets the captured decode step of a batch draw the next tokens. All rows must have the same sampling options, but each
/// row has a seed of its own.
#[derive(Debug, Default)]
pub(super) struct BatchSampler {
    /// A sampler with the options of the last steps.
    options: Option<Sampler>,
    /// The number of consecutive steps with these options.
    steps: usize,
    /// The seeds of the rows on the device.
    seeds: Vec<u64>,
}

impl BatchSampler {
    /// Prepares the graph for the choices of the sequences. Returns true if the captured step draws the tokens, and
    /// false if it takes the argmax of each row. Returns `None` if the tokens must be chosen after the step.
    ///
    /// `rows` has the buffer row of each sequence. The batch has `count` buffer rows.
    pub fn prepare(
        &mut self,
        model: &Gemma4Model,
        graph: &mut GraphCapture,
        choices: &[RowChoice<'_>],
        rows: &[usize],
        count: usize,
    ) -> Option<bool> {
        let is_argmax = |choice: &RowChoice<'_>| matches!(choice, RowChoice::Argmax);
        if choices.iter().all(is_argmax) {
            return Some(false);
        }
        let samplers = samplers_of(choices)?;
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

/// Returns the samplers of all rows. Returns `None` if a row does not draw, if rows have different sampling options, or
/// if the options depend on the text, as penalties do.
fn samplers_of<'a>(choices: &[RowChoice<'a>]) -> Option<Vec<&'a Sampler>> {
    let samplers = choices.iter().map(|choice| match choice {
        RowChoice::Draw(sampler) => Some(*sampler),
        RowChoice::Argmax | RowChoice::Logits => None,
    });
    let samplers = samplers.collect::<Option<Vec<_>>>()?;
    let first = *samplers.first()?;
    let serves = |sampler: &&Sampler| {
        sampler.draws_like(first)
            && !sampler.sampling().changes_logits()
            && !sampler.suppresses_now()
    };
    samplers.iter().all(serves).then_some(samplers)
}
