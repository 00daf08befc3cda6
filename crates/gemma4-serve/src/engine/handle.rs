//! The handle to the engine, through which the server submits requests.

use super::adapters::AdapterRegistry;
use super::affinity::Prefixes;
use super::load::EventSender;
use super::metrics::Metrics;
use super::request::{Event, Request};
use super::scheduler::Scheduler;
use super::shared::{Job, Limits, Message, Shared, reserved};
use super::supervise::{report_failure, supervise};
use crate::error::{ErrorKind, RequestError};
use burn_gemma4::{Batch, CacheKind, DeviceUse, Gemma4, Gemma4Error};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use tokio::sync::{mpsc as channel, oneshot};

/// The default of [`EngineOptions::prefix_cache_bytes`]: 512 MiB. In bf16, the keys and values of a prompt of 8,192
/// tokens take 57 MB for E2B.
pub const DEFAULT_PREFIX_CACHE_BYTES: usize = 512 << 20;

/// The default of [`EngineOptions::max_adapters`].
pub const DEFAULT_MAX_ADAPTERS: usize = 8;

/// The options of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The largest number of answers that are decoded together.
    pub max_running: usize,
    /// The largest number of requests in the queue. The engine refuses further requests.
    pub max_queue: usize,
    /// The largest total number of tokens of a prompt and its answer. A smaller `max_position_embeddings` of the model takes
    /// precedence.
    pub context: usize,
    /// The largest number of tokens in the KV cache of all answers together. `None` means `max_running` answers of `context`
    /// tokens each. The engine does not admit requests that could exceed this number. During prefill, a prompt has a
    /// separate KV cache, which does not count. The prompts of one pass have at most 512 MiB of keys and values.
    pub kv_tokens: Option<usize>,
    /// The number of prompt tokens that are prefilled between two decode steps. `None` means 256 on a CPU. On a GPU it
    /// means 2048, or 8192 while at least 8 requests wait and fewer run.
    pub prefill_chunk: Option<usize>,
    /// The largest size of the keys and values that the engine keeps of earlier prompts, in bytes on the device. A
    /// prompt that begins with the same tokens as an earlier prompt reuses the keys and values of these tokens. 0 keeps
    /// nothing.
    pub prefix_cache_bytes: usize,
    /// The storage format of the KV cache.
    pub cache: CacheKind,
    /// True to capture decode steps in CUDA graphs, on devices that support CUDA graphs.
    pub graph_capture: bool,
    /// The largest number of loaded adapters. An adapter that was unloaded counts until its requests have finished.
    pub max_adapters: usize,
    /// True to load the weights of the vision at the start, if the model has vision. Otherwise the first image loads
    /// them, while all other answers wait.
    pub load_vision: bool,
    /// True to load the weights of the audio at the start, if the model has audio. Otherwise the first clip loads them,
    /// while all other answers wait.
    pub load_audio: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_running: 32,
            max_queue: 256,
            context: 8192,
            kv_tokens: None,
            prefill_chunk: None,
            prefix_cache_bytes: DEFAULT_PREFIX_CACHE_BYTES,
            cache: CacheKind::default(),
            graph_capture: true,
            max_adapters: DEFAULT_MAX_ADAPTERS,
            load_vision: false,
            load_audio: false,
        }
    }
}

/// A handle to the engine. Clones share one engine.
#[derive(Clone, Debug)]
pub struct Engine {
    pub(super) inbox: mpsc::Sender<Message>,
    pub(super) shared: Arc<Shared>,
    pub(super) adapters: Arc<AdapterRegistry>,
    /// The name of the engine's device, if the engine is one of several. Errors then name the device.
    pub(super) device: Option<Arc<str>>,
}

impl Engine {
    /// Starts the engine's thread, which owns the model. The engine uses the device stream of the thread that loaded
    /// the model. The loading thread must therefore not use the device while the engine runs. When the engine's thread
    /// ends, the returned receiver gets the reason of a failure, or `Ok` after [`drain`](Self::drain).
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the options do not fit the model, and [`Gemma4Error::Device`] if the system
    /// cannot start a thread.
    pub fn start(
        gemma: Gemma4,
        options: EngineOptions,
    ) -> Result<(Self, oneshot::Receiver<Result<(), String>>), Gemma4Error> {
        let config = gemma.config();
        let refuse = |argument, reason: String| Err(Gemma4Error::Argument { argument, reason });
        for (argument, value) in [
            ("max_running", options.max_running),
            ("max_queue", options.max_queue),
            ("context", options.context),
        ] {
            if value == 0 {
                return refuse(argument, "is 0; expected at least 1".into());
            }
        }
        // Check the storage format before the thread starts, so that this function can return the error.
        Batch::new(gemma.model(), options.cache)?;
        let context = options.context.min(config.max_position_embeddings);
        let all = Shared::slots(options.max_running, context);
        let limits = Limits {
            context,
            kv_tokens: options.kv_tokens.unwrap_or(all),
            max_running: options.max_running,
            max_queue: options.max_queue,
            vocabulary: config.vocab_size,
            max_adapters: options.max_adapters,
        };
        Self::spawn(limits, move |shared, messages| {
            let device = gemma.device();
            let outcome = gemma.on_stream_of_weights(|| {
                let in_use = DeviceUse::begin(&device);
                if options.load_vision {
                    gemma.load_vision().map_err(|error| error.to_string())?;
                }
                if options.load_audio {
                    gemma.load_audio().map_err(|error| error.to_string())?;
                }
                let scheduler = Scheduler::new(&gemma, &options, shared.clone());
                let mut scheduler = scheduler.map_err(|error| error.to_string())?;
                drop(in_use);
                let outcome = report_failure(&shared, || scheduler.run(messages));
                let _in_use = DeviceUse::begin(&device);
                drop(scheduler);
                outcome
            });
            // The drop of the model frees memory of the device.
            let _in_use = DeviceUse::begin(&device);
            drop(gemma);
            outcome
        })
    }

    /// Starts a thread that does the engine's `work`.
    fn spawn(
        limits: Limits,
        work: impl FnOnce(Arc<Shared>, &mpsc::Receiver<Message>) -> Result<(), String> + Send + 'static,
    ) -> Result<(Self, oneshot::Receiver<Result<(), String>>), Gemma4Error> {
        let shared = Arc::new(Shared::new(limits));
        let (inbox, messages) = mpsc::channel();
        let (ended, outcome) = oneshot::channel();
        let of_thread = shared.clone();
        std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                let outcome = supervise(|| work(of_thread.clone(), &messages));
                // Close the inbox before the end is reported, so that later requests are refused.
                drop(messages);
                of_thread.end(outcome.clone());
                // Ignore a failed send: the receiver is gone if the server has ended first.
                let _ = ended.send(outcome);
            })
            .map_err(|error| Gemma4Error::Device(format!("cannot start a thread: {error}")))?;
        let engine = Self {
            inbox,
            adapters: Arc::new(AdapterRegistry::new(limits.max_adapters)),
            shared,
            device: None,
        };
        Ok((engine, outcome))
    }

    /// Submits a request. The returned receiver gets the events of all answers. Dropping the receiver cancels the request.
    ///
    /// # Errors
    /// Returns an error if the request exceeds a limit, if the queue is full, or if the engine is draining or has failed.
    pub fn submit(
        &self,
        request: Request,
    ) -> Result<channel::UnboundedReceiver<Event>, RequestError> {
        self.submit_with(request, None)
    }

    /// Submits a request, whose prefixes the engine records when it has kept their keys and values.
    pub(super) fn submit_with(
        &self,
        request: Request,
        prefixes: Option<Prefixes>,
    ) -> Result<channel::UnboundedReceiver<Event>, RequestError> {
        self.check(&request)?;
        self.check_running()?;
        if !self.shared.enter_queue() {
            return Err(self.refuse_full());
        }
        let (events, receiver) = channel::unbounded_channel();
        let load = &self.shared.load;
        let share = load.add(request.choices, reserved(&request));
        let job = Job {
            request,
            events: EventSender::new(events, share),
            arrived: Instant::now(),
            prefixes,
        };
        match self.inbox.send(Message::Submit(Box::new(job))) {
            Ok(()) => Ok(receiver),
            Err(_) => {
                self.shared.leave_queue(1);
                Err(self.failure().unwrap_or_else(draining))
            }
        }
    }

    /// Checks that the engine has not failed, and is not draining.
    pub(super) fn check_running(&self) -> Result<(), RequestError> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        match self.shared.is_draining() {
            true => Err(draining()),
            false => Ok(()),
        }
    }

    /// Counts a request that is refused because the queue is full, and returns its error.
    pub(super) fn refuse_full(&self) -> RequestError {
        let requests = &self.shared.metrics.requests;
        requests.with_label_values(&["refused"]).inc();
        let message = format!(
            "the queue is full with {} requests; try again later",
            self.shared.limits.max_queue
        );
        RequestError::new(ErrorKind::Busy, message)
    }

    /// Checks the request against the engine's limits.
    fn check(&self, request: &Request) -> Result<(), RequestError> {
        let vocabulary = self.shared.limits.vocabulary;
        let refuse = |reason: String| Err(RequestError::field("prompt", reason));
        let tokens = request.prompt.tokens();
        if tokens.is_empty() {
            return refuse("has no tokens; expected at least 1".into());
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return refuse(format!(
                "has the token {token}; expected tokens below {vocabulary}"
            ));
        }
        self.check_size(tokens.len(), request.choices, request.options.max_tokens)
    }

    /// Checks the numbers of prompt tokens, of answers, and of tokens of an answer against the engine's limits.
    pub(super) fn check_size(
        &self,
        prompt: usize,
        choices: usize,
        max_tokens: usize,
    ) -> Result<(), RequestError> {
        let limits = &self.shared.limits;
        let refuse = |field, reason: String| Err(RequestError::field(field, reason));
        if choices == 0 || choices > limits.max_running {
            let reason = format!("is {choices}; expected 1 to {}", limits.max_running);
            return refuse("n", reason);
        }
        if max_tokens == 0 {
            return refuse("max_tokens", "is 0; expected at least 1".into());
        }
        let longest = prompt.saturating_add(max_tokens);
        if longest > limits.context {
            let message = format!(
                "the context has {} tokens, but the prompt has {prompt} and the answer may have {max_tokens}; \
                 shorten the prompt or lower max_tokens",
                limits.context
            );
            return Err(RequestError::new(ErrorKind::ContextLength, message));
        }
        if !limits.fit(choices, longest) {
            let slots = Shared::slots(choices, longest);
            let message = format!(
                "the KV cache has {} tokens, but this request needs {slots}; lower n or max_tokens",
                limits.kv_tokens
            );
            return Err(RequestError::new(ErrorKind::ContextLength, message));
        }
        Ok(())
    }

    /// Lets the engine finish the submitted requests, and refuse all further requests. The engine's thread then ends.
    pub fn drain(&self) {
        self.shared.drain();
        // An error means that the thread has ended already.
        let _ = self.inbox.send(Message::Wake);
    }

    /// True if [`drain`](Self::drain) has been called.
    pub fn is_draining(&self) -> bool {
        self.shared.is_draining()
    }

    /// Waits until the engine's thread ends. Then returns the error for a request whose events ended before the
    /// request's answer was complete. The wait is necessary because the events end before the thread reports why the
    /// thread failed.
    pub async fn stopped(&self) -> RequestError {
        self.shared.ended().await;
        self.failure().unwrap_or_else(draining)
    }

    /// Returns the reason why the engine has failed, or `None` if it has not failed.
    pub fn failure(&self) -> Option<RequestError> {
        let reason = self.shared.failure()?;
        let message = match &self.device {
            Some(device) => format!("the engine of {device} has failed: {reason}"),
            None => format!("the engine has failed: {reason}"),
        };
        Some(RequestError::new(ErrorKind::Internal, message))
    }

    /// The metrics of the engine.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// The largest total number of tokens of a prompt and its answer.
    pub fn context(&self) -> usize {
        self.shared.limits.context
    }

    /// The largest number of answers to one prompt, which is the largest number of answers that are decoded together.
    pub fn max_choices(&self) -> usize {
        self.shared.limits.max_running
    }
}

pub(super) fn draining() -> RequestError {
    let message = "the server is shutting down; send the request to another server";
    RequestError::new(ErrorKind::Draining, message)
}

#[cfg(test)]
impl Engine {
    /// Starts an engine without a model, which answers the first `requests` requests with one word each and then panics.
    pub(crate) fn that_panics(
        requests: usize,
        reason: &'static str,
    ) -> (Self, oneshot::Receiver<Result<(), String>>) {
        use std::time::Duration;
        let limits = Limits {
            context: 1000,
            kv_tokens: usize::MAX,
            max_running: 8,
            max_queue: 8,
            vocabulary: usize::MAX,
            max_adapters: 0,
        };
        let engine = Self::spawn(limits, move |_, messages| {
            let jobs: Vec<_> = messages.iter().take(requests).collect();
            for job in &jobs {
                if let Message::Submit(job) = job {
                    let event = Event::Text {
                        choice: 0,
                        kind: burn_gemma4::TextKind::Answer,
                        text: "word".into(),
                        logprobs: Vec::new(),
                    };
                    job.events.send(event).expect("the client waits");
                }
            }
            // End the clients' events first, so that the clients see the end before this thread can report the reason.
            drop(jobs);
            std::thread::sleep(Duration::from_millis(50));
            panic!("{reason}");
        });
        engine.expect("a thread")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::answer_options;

    fn request() -> Request {
        Request {
            prompt: vec![1].into(),
            choices: 1,
            options: answer_options(),
            constraint: None,
            adapter: None,
            media_memory: None,
        }
    }

    #[tokio::test]
    async fn stopped_after_a_panic_gives_its_reason() {
        let (engine, outcome) = Engine::that_panics(2, "kernel 3 failed");
        let first = engine.submit(request()).expect("the queue has a place");
        let second = engine.submit(request()).expect("the queue has a place");
        for mut events in [first, second] {
            assert!(matches!(events.recv().await, Some(Event::Text { .. })));
            assert_eq!(events.recv().await, None);
            let error = engine.stopped().await;
            assert_eq!(error.status(), 500);
            assert_eq!(error.message, "the engine has failed: kernel 3 failed");
        }
        let reason = outcome.await.expect("the thread reports its end");
        assert_eq!(reason, Err("kernel 3 failed".into()));
        let error = engine.submit(request()).expect_err("the engine has failed");
        assert!(error.message.contains("kernel 3"), "{error}");
    }

    #[tokio::test]
    async fn submit_after_the_end_of_a_drain_is_refused_as_draining() {
        let limits = Engine::that_panics(1, "").0.shared.limits;
        let (engine, outcome) = Engine::spawn(limits, |_, _| Ok(())).expect("a thread");
        assert_eq!(outcome.await.expect("the thread reports its end"), Ok(()));
        // The engine's thread ends before this request is submitted, as if a drain had begun just after `submit`
        // checked for a drain.
        let error = engine.submit(request()).expect_err("the engine has ended");
        assert_eq!(error.status(), 503);
        assert_eq!(engine.stopped().await.status(), 503);
    }

    #[tokio::test]
    async fn failure_is_reported_before_the_requests_are_dropped() {
        let limits = Engine::that_panics(1, "").0.shared.limits;
        let engine = Engine::spawn(limits, |shared, messages| {
            let job = messages.recv();
            let outcome = report_failure(&shared, || panic!("kernel 3 failed"));
            assert_eq!(shared.failure(), Some("kernel 3 failed".into()));
            assert_eq!(shared.load.answers().0, 1);
            drop(job);
            assert_eq!(shared.load.answers().0, 0);
            outcome
        });
        let (engine, outcome) = engine.expect("a thread");
        let mut events = engine.submit(request()).expect("the queue has a place");
        assert_eq!(events.recv().await, None);
        let reason = outcome.await.expect("the thread reports its end");
        assert_eq!(reason, Err("kernel 3 failed".into()));
    }
}
