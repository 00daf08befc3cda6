//! Admission: which requests begin, and how many prompt tokens precede the next decode step.

use super::{Prefilling, Scheduler};
use crate::engine::answer::Answer;
use crate::engine::request::Event;
use crate::engine::shared::Job;
use crate::error::RequestError;
use burn_gemma4::{Prefill, PrefixCache};
use std::collections::VecDeque;
use std::sync::Arc;

/// If at least this number of requests waits on a GPU, more prompts are prefilled between two decode steps. Each decode
/// step of a few answers would delay all waiting requests.
const MANY_WAITING: usize = 8;
/// The factor by which the number of prompt tokens between two decode steps grows if many requests wait. On an H200,
/// E2B's answers then pause for about 50 ms (2026-11-29).
const MORE_CHUNKS: usize = 4;

impl<'a> Scheduler<'a> {
    /// The number of answers that will be in the batch as soon as all prompts are prefilled for which there is room.
    pub(super) fn expected_answers(&self) -> usize {
        let (mut answers, mut longest) = self.admitted();
        for job in &self.queue {
            let (more, longer) = (answers + job.request.choices, longest.max(job.reserved()));
            if !self.shared.limits.fit(more, longer) {
                break;
            }
            (answers, longest) = (more, longer);
        }
        answers
    }

    /// The number of prompt tokens that are prefilled before the next decode step.
    pub(super) fn prompt_tokens_of_round(&self) -> usize {
        // Admitted prompts wait, too. Otherwise a pass that was left for this round would be split.
        let waiting = self.queue.len() + self.prefilling.len();
        let is_burst = waiting >= MANY_WAITING.max(self.running.len())
            && self.options.prefill_chunk.is_none()
            && self.gemma.model().is_accelerated();
        match is_burst {
            true => self.chunk * MORE_CHUNKS,
            false => self.chunk,
        }
    }

    /// True if the KV cache and the batch have room for the answers of a request.
    pub(super) fn has_room(&self, job: &Job) -> bool {
        let (answers, longest) = self.admitted();
        self.shared
            .limits
            .fit(answers + job.request.choices, longest.max(job.reserved()))
    }

    /// The number of admitted answers, and the largest number of tokens for which one of them has reserved space in the
    /// KV cache.
    fn admitted(&self) -> (usize, usize) {
        let prefilling = self.prefilling.iter();
        let prefilling = prefilling.map(|one| (one.answers.len(), one.reserved));
        let running = self.running.iter().map(|running| (1, running.reserved));
        running
            .chain(prefilling)
            .fold((0, 0), |(answers, longest), (more, reserved)| {
                (answers + more, longest.max(reserved))
            })
    }

    /// Starts the prefills of the first requests in the queue, as long as the KV cache and the batch have room for
    /// their answers. Several prefills begin only if one pass of at most `budget` tokens can run all of them.
    pub(super) fn admit(&mut self, budget: usize) {
        while let Some(job) = self.queue.front() {
            let joins = self.prefilling.is_empty() || self.may_pack(job, budget);
            if !joins || !self.has_room(job) {
                return;
            }
            let Some(mut job) = self.queue.pop_front() else {
                return;
            };
            self.shared.leave_queue(1);
            let metrics = &self.shared.metrics;
            metrics.waiting.observe(job.arrived.elapsed().as_secs_f64());
            let (events, reserved, arrived) = (job.events.clone(), job.reserved(), job.arrived);
            let adapter = job.request.adapter.clone();
            let prefixes = job.prefixes.take();
            let media_memory = job.request.media_memory.take();
            match self.begin(job) {
                Ok((prefill, answers)) => {
                    self.prefilling.push_back(Prefilling {
                        prefill,
                        answers,
                        adapter,
                        prefixes,
                        reserved,
                        arrived,
                        media_memory,
                    });
                }
                Err(error) => {
                    // Ignore a failed send: the client has disconnected.
                    let _ = events.send(Event::Failed(error));
                    self.count_outcome("failed", 1);
                }
            }
        }
    }

    /// The number of tokens of the longest prompt that a graph may run as a whole. Such a prompt reuses no prefix.
    pub(super) fn longest_whole(&self) -> usize {
        let longest = self.gemma.longest_whole_prompt(self.options.cache);
        match self.options.graph_capture {
            true => longest.min(self.chunk),
            false => 0,
        }
    }

    /// True if one pass can run the prompt of a request with the prompts that are being prefilled. A prompt that could
    /// reuse the keys and values of one of them waits for that prompt.
    fn may_pack(&self, job: &Job, budget: usize) -> bool {
        let (mut prefilling, tokens) = (self.prefilling.iter(), job.request.prompt.tokens());
        let admitted: usize = self.prefilling.iter().map(Prefilling::remaining).sum();
        if !is_plain(job) || admitted >= budget.min(self.most_packed) {
            return false;
        }
        let runs_whole = tokens.len() <= self.longest_whole();
        let reusable = match runs_whole {
            true => 0,
            false => self.prefixes.reusable(tokens, self.options.cache),
        };
        let waits = |prefill| !runs_whole && self.prefixes.would_share(prefill, tokens, reusable);
        admitted + tokens.len() - reusable <= budget.min(self.most_packed)
            && prefilling.all(|one| one.prefill.can_pack() && !waits(&one.prefill))
    }

    /// The number of the first prompts that the next pass runs, with at most `budget` tokens. One prompt alone is read
    /// in chunks.
    pub(super) fn prompts_of_pass(&self, budget: usize) -> usize {
        let prefilling = self.prefilling.iter().map(|one| &one.prefill);
        let prefilling: Vec<&Prefill> = prefilling.collect();
        let count = Prefill::count_packable(&prefilling, budget.min(self.most_packed));
        match Prefill::is_faster_packed(&prefilling[..count]) {
            true => count,
            false => 1,
        }
    }

    pub(super) fn begin(&mut self, job: Job) -> Result<(Prefill, Vec<Answer<'a>>), RequestError> {
        let request = job.request;
        let options = Arc::new(request.options);
        let answers = (0..request.choices).map(|choice| {
            Answer::new(
                choice,
                request.prompt.tokens(),
                &options,
                request
                    .constraint
                    .as_ref()
                    .map(|constraint| constraint.copy()),
                self.gemma.tokenizer(),
                job.events.clone(),
            )
        });
        let answers = answers.collect::<Result<Vec<_>, _>>()?;
        let mut prefill = self.gemma.prefill(request.prompt, self.options.cache)?;
        if !self.options.graph_capture {
            prefill = prefill.without_graph_capture();
        }
        if let Some(adapter) = &request.adapter {
            prefill = prefill.with_adapter(self.adapters.get(adapter)?)?;
        }
        self.prefixes.resume(&mut prefill);
        let longest_whole = self.longest_whole();
        take_checkpoint(&mut prefill, &self.prefixes, &self.queue, longest_whole);
        Ok((prefill, answers))
    }
}

/// Lets the prefill of a prompt take a checkpoint at the end of a prefix for which requests in the queue wait. They
/// then reuse the whole prefix. Prompts of at most `longest_whole` tokens reuse none.
pub(super) fn take_checkpoint(
    prefill: &mut Prefill,
    prefixes: &PrefixCache,
    queue: &VecDeque<Job>,
    longest_whole: usize,
) {
    let waiting = queue.iter().filter(|job| is_plain(job));
    let prompts = waiting.map(|job| job.request.prompt.tokens());
    let prompts = prompts.filter(|tokens| tokens.len() > longest_whole);
    prefixes.take_checkpoint_for(prefill, prompts);
}

/// True if a request has neither an adapter nor images.
fn is_plain(job: &Job) -> bool {
    job.request.adapter.is_none() && job.request.prompt.media().next().is_none()
}
