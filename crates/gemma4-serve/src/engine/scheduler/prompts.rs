//! The prompts that are being prefilled: one prompt in chunks, or several prompts in one forward pass.

use super::admission::take_checkpoint;
use super::{Running, Scheduler};
use crate::engine::adapters::ServedAdapter;
use crate::engine::affinity::Prefixes;
use crate::engine::answer::Answer;
use crate::engine::media_memory::MediaMemory;
use burn_gemma4::{Gemma4Error, Prefill, RowChoice, RowResult};
use std::time::Instant;

/// A request whose prompt is being prefilled.
pub(super) struct Prefilling<'a> {
    pub prefill: Prefill,
    pub answers: Vec<Answer<'a>>,
    pub adapter: Option<ServedAdapter>,
    /// The prefixes of the prompt, if the engine is one of several.
    pub prefixes: Option<Prefixes>,
    pub reserved: usize,
    pub arrived: Instant,
    /// Holds the memory of the prompt's images and audio.
    pub media_memory: Option<MediaMemory>,
}

impl Prefilling<'_> {
    /// The number of prompt tokens that the model has not processed yet.
    pub fn remaining(&self) -> usize {
        self.prefill.remaining()
    }
}

impl<'a> Scheduler<'a> {
    /// Prefills prompts before the next decode step. Stops earlier if no further request can be admitted.
    pub(super) fn read_prompts(&mut self) -> Result<(), Gemma4Error> {
        let most = self.prompt_tokens_of_round();
        let mut budget = most;
        while budget > 0 {
            // If many requests wait, a pass over several prompts may exceed the rest of this round. Otherwise the prompts
            // that do not fit would wait for a decode step of few answers.
            let of_pass = if most > self.chunk { most } else { budget };
            self.admit(of_pass);
            let Some(first) = self.prefilling.front() else {
                return Ok(());
            };
            // Leave a chunk that exceeds the rest of this round for the next round. A shorter chunk would need a CUDA
            // graph of another size.
            if first.remaining().min(self.chunk) > budget && budget < most {
                return Ok(());
            }
            let count = match self.prompts_of_pass(of_pass) {
                0 | 1 => self.read_chunk()?,
                prompts => self.read_pack(prompts)?,
            };
            budget = budget.saturating_sub(count);
        }
        Ok(())
    }

    /// Prefills one chunk of the first prompt. Returns the number of tokens that the model has processed, or the size of a
    /// chunk after a call that took as long without tokens.
    fn read_chunk(&mut self) -> Result<usize, Gemma4Error> {
        let longest_whole = self.longest_whole();
        let Some(first) = self.prefilling.front_mut() else {
            return Ok(self.chunk);
        };
        // Requests that have come since the prompt's last chunk may wait for one of its prefixes.
        take_checkpoint(
            &mut first.prefill,
            &self.prefixes,
            &self.queue,
            longest_whole,
        );
        let before = first.remaining();
        let result = match first.prefill.advance(self.chunk) {
            Ok(Some(logits)) => Some(logits.choose(&[row_choice(&first.answers)])?.remove(0)),
            Ok(None) => None,
            Err(error @ Gemma4Error::Device(_)) => return Err(error),
            // The weights of a tower cannot be loaded. Requests without images and audio are not affected.
            Err(error) => {
                self.fail_first(error);
                return Ok(0);
            }
        };
        let count = before - first.remaining();
        self.shared.metrics.prompt_tokens.inc_by(count as u64);
        // Only now take the request from the list. If the device fails, the failure must be reported before the request
        // is dropped.
        if let Some(result) = result
            && let Some(first) = self.prefilling.pop_front()
        {
            self.join(vec![(first, result)])?;
        }
        // A call that runs a part of a tower reads no tokens, and takes about as long as a chunk.
        Ok(if count == 0 { self.chunk } else { count })
    }

    /// Ends the request whose prompt is the first with an error.
    fn fail_first(&mut self, error: Gemma4Error) {
        if let Some(failed) = self.prefilling.pop_front() {
            self.count_outcome("failed", failed.answers.len());
            // One error ends all answers of a request.
            if let Some(first) = failed.answers.first() {
                first.fail(error.into());
            }
        }
    }

    /// Prefills the first `prompts` prompts in one pass. Returns the number of tokens that the model has processed.
    fn read_pack(&mut self, prompts: usize) -> Result<usize, Gemma4Error> {
        let pack = self.prefilling.iter().take(prompts);
        let count: usize = pack.map(Prefilling::remaining).sum();
        let pack = self.prefilling.iter_mut().take(prompts);
        let mut prefills: Vec<&mut Prefill> = pack.map(|one| &mut one.prefill).collect();
        let logits = Prefill::read_packed(&mut prefills)?;
        let pack = self.prefilling.iter().take(prompts);
        let choices: Vec<_> = pack.map(|one| row_choice(&one.answers)).collect();
        let results = logits.choose(&choices)?;
        if !results.iter().all(RowResult::has_token) {
            // NaN in the keys of one prompt may have reached the others. Run each of them alone, so that only this
            // prompt fails.
            let pack = self.prefilling.iter_mut().take(prompts);
            pack.for_each(|one| one.prefill.run_alone());
            return Ok(count);
        }
        let metrics = &self.shared.metrics;
        metrics.prompt_tokens.inc_by(count as u64);
        metrics.packed_prompts.inc_by(prompts as u64);
        let pack: Vec<_> = self.prefilling.drain(..prompts).zip(results).collect();
        self.join(pack)?;
        Ok(count)
    }

    /// Passes the first token to each answer of prefilled requests, and adds the answers that have not ended to the
    /// batch.
    fn join(&mut self, pack: Vec<(Prefilling<'a>, RowResult)>) -> Result<(), Gemma4Error> {
        let (mut joining, mut finished) = (Vec::new(), Vec::new());
        for (prefilling, result) in pack {
            let Prefilling {
                prefill,
                mut answers,
                adapter,
                prefixes,
                reserved,
                arrived,
                media_memory,
            } = prefilling;
            // The inputs are dropped. A client that has its answer can use the memory for its next request.
            drop(media_memory);
            let metrics = &self.shared.metrics;
            metrics.first_token.observe(arrived.elapsed().as_secs_f64());
            let cached = prefill.reused();
            metrics.cached_prompt_tokens.inc_by(cached as u64);
            if let Some(first) = answers.first_mut() {
                first.set_cached_tokens(cached);
            }
            for mut answer in answers {
                if self.take(&mut answer, result.clone()) {
                    let running = Running {
                        answer,
                        _adapter: adapter.clone(),
                        reserved,
                        arrived,
                    };
                    joining.push((finished.len(), running));
                }
            }
            finished.push((prefill, prefixes, result.has_token()));
        }
        let prefills = joining.iter().map(|(index, _)| &finished[*index].0);
        self.batch.join_all(&prefills.collect::<Vec<_>>())?;
        let joining = joining.into_iter().map(|(_, running)| running);
        self.running.extend(joining);
        finished.retain(|(_, _, has_token)| *has_token);
        let (prefills, prefixes): (Vec<_>, Vec<_>) = finished
            .into_iter()
            .map(|(prefill, prefixes, _)| (prefill, prefixes))
            .unzip();
        for (prefixes, is_kept) in prefixes.into_iter().zip(self.prefixes.keep_all(prefills)) {
            if let Some(prefixes) = prefixes.filter(|_| is_kept) {
                self.shared.recent_prefixes.record(&prefixes);
            }
        }
        Ok(())
    }
}

/// Returns the way to choose the first token from the row of logits that all answers to a prompt share.
fn row_choice<'b>(answers: &'b [Answer<'_>]) -> RowChoice<'b> {
    match answers {
        [answer] => answer.row_choice(),
        // If several answers draw tokens, the batch must return the row, because each answer draws with a separate
        // seed.
        [first, ..] if !matches!(first.row_choice(), RowChoice::Argmax) => RowChoice::Logits,
        _ => RowChoice::Argmax,
    }
}
