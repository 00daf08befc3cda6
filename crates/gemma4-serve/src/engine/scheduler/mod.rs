//! The main loop of the engine's thread: prefills prompts in chunks, and decodes all answers together.

mod admission;
mod prompts;

use super::adapters::ServedAdapter;
use super::answer::Answer;
use super::device_adapters::DeviceAdapters;
use super::handle::EngineOptions;
use super::shared::{Job, Message, Shared};
use burn_gemma4::{
    Batch, DeviceUse, Gemma4, Gemma4Error, Prefill, PrefixCache, RowChoice, RowResult,
};
use prompts::Prefilling;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

/// The default number of prompt tokens that are prefilled between two decode steps, on a CPU.
const CPU_CHUNK: usize = 256;
/// The default number of prompt tokens that are prefilled between two decode steps, on a GPU.
const GPU_CHUNK: usize = 2048;

/// The time after the last request in which the batch keeps its buffers and its CUDA graph. If 64 requests arrive at a
/// server that has freed them, the last first token of E2B comes after 820 ms instead of 430 ms (H200, 2026-11-29).
const BUFFERS_KEPT: Duration = Duration::from_secs(60);

/// An answer that is being decoded.
struct Running<'a> {
    answer: Answer<'a>,
    /// Keeps the adapter of the answer on the device.
    _adapter: Option<ServedAdapter>,
    reserved: usize,
    arrived: Instant,
}

/// The state of the engine's thread.
pub(super) struct Scheduler<'a> {
    gemma: &'a Gemma4,
    options: &'a EngineOptions,
    shared: Arc<Shared>,
    batch: Batch,
    /// The keys and values of earlier prompts.
    prefixes: PrefixCache,
    adapters: DeviceAdapters,
    /// The largest number of tokens in one call of the model over one prompt.
    chunk: usize,
    /// The largest number of tokens in one pass over several prompts.
    most_packed: usize,
    queue: VecDeque<Job>,
    /// The requests whose prompts are being prefilled, in the order of their arrival. If there are several, one pass
    /// may run their prompts.
    prefilling: VecDeque<Prefilling<'a>>,
    /// The answers that are being decoded. Element `i` is row `i` of the batch.
    running: Vec<Running<'a>>,
}

impl<'a> Scheduler<'a> {
    pub fn new(
        gemma: &'a Gemma4,
        options: &'a EngineOptions,
        shared: Arc<Shared>,
    ) -> Result<Self, Gemma4Error> {
        let batch = Batch::new(gemma.model(), options.cache)?;
        let chunk = match gemma.model().is_accelerated() {
            true => GPU_CHUNK,
            false => CPU_CHUNK,
        };
        let chunk = options.prefill_chunk.unwrap_or(chunk).max(1);
        if options.graph_capture {
            let whole = gemma.longest_whole_prompt(options.cache).min(chunk);
            shared.recent_prefixes.set_shortest_prompt(whole + 1);
        }
        Ok(Self {
            batch: match options.graph_capture {
                true => batch,
                false => batch.without_graph_capture(),
            },
            prefixes: PrefixCache::new(gemma.model(), options.prefix_cache_bytes, chunk),
            adapters: DeviceAdapters::default(),
            chunk,
            most_packed: Prefill::most_packed_tokens(gemma.model(), chunk),
            gemma,
            options,
            shared,
            queue: VecDeque::new(),
            prefilling: VecDeque::new(),
            running: Vec::new(),
        })
    }

    /// Processes requests until [`Engine::drain`](super::Engine::drain) has been called and all requests have ended.
    pub fn run(&mut self, inbox: &Receiver<Message>) -> Result<(), Gemma4Error> {
        let device = self.gemma.device();
        loop {
            // Captures of other engines run between two iterations, or while this engine waits for a message.
            let _in_use = DeviceUse::begin(&device);
            if !self.receive(inbox) {
                self.free_buffers();
                return Ok(());
            }
            self.remove_abandoned();
            self.batch.expect(self.expected_answers());
            self.read_prompts()?;
            self.decode()?;
            self.update_gauges();
        }
    }

    /// Moves new requests from the inbox to the queue, and waits for a message if there is no other work. Returns false if
    /// the thread must end.
    fn receive(&mut self, inbox: &Receiver<Message>) -> bool {
        loop {
            self.free_adapters();
            let is_idle =
                self.queue.is_empty() && self.prefilling.is_empty() && self.running.is_empty();
            let is_draining = self.shared.is_draining();
            let message = match is_idle && !is_draining {
                true => self.wait(inbox),
                false => inbox.try_recv(),
            };
            match message {
                Ok(Message::Submit(job)) => self.queue.push_back(*job),
                Ok(Message::Load(load)) => self.adapters.load(*load, self.gemma.model()),
                Ok(Message::Wake) => (),
                // End the thread only if it is idle and draining. The inbox was read after `is_draining`, so all
                // requests from before the drain have left the inbox.
                Err(TryRecvError::Empty) => return !(is_idle && is_draining),
                Err(TryRecvError::Disconnected) => return !is_idle,
            }
        }
    }

    /// Waits for a message. Frees the buffers of the batch if none comes for some time.
    fn wait(&mut self, inbox: &Receiver<Message>) -> Result<Message, TryRecvError> {
        self.update_gauges();
        match DeviceUse::pause(|| inbox.recv_timeout(BUFFERS_KEPT)) {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Disconnected) => return Err(TryRecvError::Disconnected),
            Err(RecvTimeoutError::Timeout) => self.free_buffers(),
        }
        DeviceUse::pause(|| inbox.recv()).map_err(|_| TryRecvError::Disconnected)
    }

    fn free_buffers(&mut self) {
        self.batch.free_if_empty();
        self.update_gauges();
    }

    /// Frees the unloaded adapters that no request uses, and the keys and values that were computed with them.
    fn free_adapters(&mut self) {
        let (batch, prefixes) = (&mut self.batch, &mut self.prefixes);
        self.adapters.remove_unused(|adapter| {
            batch.forget_adapter(adapter.id());
            prefixes.forget_adapter(adapter.id());
        });
    }

    /// Removes the requests whose clients have disconnected.
    fn remove_abandoned(&mut self) {
        let before = self.queue.len();
        let mut answers = 0;
        self.queue.retain(|job| {
            let is_closed = job.events.is_closed();
            answers += usize::from(is_closed) * job.request.choices;
            !is_closed
        });
        self.shared.leave_queue(before - self.queue.len());
        self.count_outcome("cancelled", answers);
        let mut answers = 0;
        self.prefilling.retain(|one| {
            let is_abandoned = one.answers.iter().all(Answer::is_abandoned);
            answers += usize::from(is_abandoned) * one.answers.len();
            !is_abandoned
        });
        self.count_outcome("cancelled", answers);
        for index in (0..self.running.len()).rev() {
            if self.running[index].answer.is_abandoned() {
                self.leave(index);
                self.count_outcome("cancelled", 1);
            }
        }
    }

    fn leave(&mut self, index: usize) {
        self.batch.leave(index);
        self.running.swap_remove(index);
    }

    fn count_outcome(&self, outcome: &str, count: usize) {
        let counter = self.shared.metrics.requests.with_label_values(&[outcome]);
        counter.inc_by(count as u64);
    }

    /// Passes a token to an answer. Returns true if the answer has not ended.
    fn take(&self, answer: &mut Answer<'_>, result: RowResult) -> bool {
        let metrics = &self.shared.metrics;
        let now = Instant::now();
        if let Some(last) = answer.last_time.replace(now) {
            metrics.between_tokens.observe((now - last).as_secs_f64());
        }
        metrics.generated_tokens.inc();
        match answer.take(result) {
            Ok(false) => true,
            Ok(true) => {
                self.count_outcome("finished", 1);
                false
            }
            Err(error) => {
                answer.fail(error);
                self.count_outcome("failed", 1);
                false
            }
        }
    }

    /// True if no sequence is expected to join or leave the batch after the next step. The device may then start the
    /// following step before the host has received the tokens of the next step.
    fn goes_on(&self) -> bool {
        let mut running = self.running.iter();
        let joins = self.queue.front().is_some_and(|job| self.has_room(job));
        !joins
            && self.prefilling.is_empty()
            && running.all(|running| running.answer.remaining() > 1)
    }

    /// Runs one decode step for all answers in the batch.
    fn decode(&mut self) -> Result<(), Gemma4Error> {
        if self.running.is_empty() {
            return Ok(());
        }
        let tokens: Vec<u32> = self.running.iter().map(|one| one.answer.last).collect();
        let answers = self.running.iter();
        let choices: Vec<RowChoice<'_>> = answers.map(|one| one.answer.row_choice()).collect();
        let goes_on = self.goes_on();
        let results = self.batch.follow(&tokens, &choices, goes_on)?;
        let mut running = std::mem::take(&mut self.running);
        let goes_on: Vec<bool> = running
            .iter_mut()
            .zip(results)
            .map(|(running, result)| self.take(&mut running.answer, result))
            .collect();
        self.running = running;
        for (index, goes_on) in goes_on.into_iter().enumerate().rev() {
            if !goes_on {
                let running = &self.running[index];
                log::debug!(
                    "answer of {} tokens in {:.3} s",
                    running.answer.tokens(),
                    running.arrived.elapsed().as_secs_f64()
                );
                self.leave(index);
            }
        }
        Ok(())
    }

    fn update_gauges(&self) {
        let metrics = &self.shared.metrics;
        let reserved: usize = self.running.iter().map(|one| one.reserved).sum();
        let prefilling = self.prefilling.iter();
        let prefilling = prefilling.map(|one| one.reserved * one.answers.len());
        let reserved = reserved + prefilling.sum::<usize>();
        metrics.running.set(self.running.len() as i64);
        metrics.prefilling.set(self.prefilling.len() as i64);
        metrics.reserved_tokens.set(reserved as i64);
        metrics.cache_bytes.set(self.batch.bytes() as i64);
        metrics.prefix_cache_bytes.set(self.prefixes.bytes() as i64);
    }
}
