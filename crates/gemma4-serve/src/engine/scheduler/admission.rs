//! Admission: which requests begin, and how many prompt tokens precede the next decode step.

use super::{Prefilling, Scheduler};
use crate::engine::answer::Answer;
use crate::engine::request::Event;
use crate::engine::shared::Job;
use crate::error::RequestError;
use burn_gemma4::Prefill;
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
        let mut answers = self.running.len();
        let mut longest = self.longest_reserved();
        if let Some(prefilling) = &self.prefilling {
            answers += prefilling.answers.len();
            longest = longest.max(prefilling.reserved);
        }
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
        let waiting = self.queue.len();
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
        let answers = self.running.len() + job.request.choices;
        self.shared
            .limits
            .fit(answers, self.longest_reserved().max(job.reserved()))
    }

    /// The largest number of tokens for which an answer in the batch has reserved space in the KV cache.
    pub(super) fn longest_reserved(&self) -> usize {
        let reserved = self.running.iter().map(|running| running.reserved);
        reserved.max().unwrap_or(0)
    }

    /// Starts the prefill of the first request in the queue, if the KV cache and the batch have room for its answers.
    pub(super) fn admit(&mut self) {
        while self.prefilling.is_none()
            && let Some(job) = self.queue.front()
        {
            if !self.has_room(job) {
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
            match self.begin(job) {
                Ok((prefill, answers)) => {
                    self.prefilling = Some(Prefilling {
                        prefill,
                        answers,
                        adapter,
                        prefixes,
                        reserved,
                        arrived,
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

    pub(super) fn begin(&mut self, job: Job) -> Result<(Prefill, Vec<Answer<'a>>), RequestError> {
        let request = job.request;
        let options = Arc::new(request.options);
        let answers = (0..request.choices).map(|choice| {
            Answer::new(
                choice,
                &request.prompt,
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
        let mut prefill = match self.options.graph_capture {
            true => self.gemma.prefill(request.prompt, self.options.cache)?,
            false => Prefill::new(self.gemma.model(), request.prompt, self.options.cache)?,
        };
        if let Some(adapter) = &request.adapter {
            prefill = prefill.with_adapter(self.adapters.get(adapter)?)?;
        }
        self.prefixes.resume(&mut prefill);
        Ok((prefill, answers))
    }
}
