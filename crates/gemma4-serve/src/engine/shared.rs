//! The state that the handles and the engine's thread share, and the messages between them.

use super::adapters::Load;
use super::affinity::{Prefixes, RecentPrefixes};
use super::load::{EngineLoad, EventSender};
use super::metrics::Metrics;
use super::request::Request;
use burn_gemma4::Batch;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;
use tokio::sync::watch;

/// The limits of the engine, computed from its options and the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub context: usize,
    pub kv_tokens: usize,
    pub max_running: usize,
    pub max_queue: usize,
    pub vocabulary: usize,
    pub max_adapters: usize,
}

impl Limits {
    /// True if the batch and the KV cache have room for `answers` answers of up to `longest` tokens.
    pub fn fit(&self, answers: usize, longest: usize) -> bool {
        answers <= self.max_running && Shared::slots(answers, longest) <= self.kv_tokens
    }
}

/// A request on its way to the engine's thread.
pub(super) struct Job {
    pub request: Request,
    pub events: EventSender,
    pub arrived: Instant,
    /// The prefixes of the prompt, if the engine is one of several.
    pub prefixes: Option<Prefixes>,
}

impl Job {
    /// The largest number of tokens that an answer of this request can have in the KV cache.
    pub fn reserved(&self) -> usize {
        reserved(&self.request)
    }
}

/// The largest number of tokens that an answer of `request` can have in the KV cache.
pub(super) fn reserved(request: &Request) -> usize {
    let prompt = request.prompt.len();
    prompt.saturating_add(request.options.max_tokens)
}

/// A message to the engine's thread.
pub(super) enum Message {
    Submit(Box<Job>),
    Load(Box<Load>),
    Wake,
}

/// The state that the handles and the engine's thread share.
#[derive(Debug)]
pub(super) struct Shared {
    waiting: AtomicUsize,
    draining: AtomicBool,
    /// The outcome of the engine's thread, or `None` while the thread runs.
    outcome: watch::Sender<Option<Result<(), String>>>,
    pub limits: Limits,
    pub load: Arc<EngineLoad>,
    pub recent_prefixes: RecentPrefixes,
    pub metrics: Metrics,
}

impl Shared {
    pub fn new(limits: Limits) -> Self {
        Self {
            waiting: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            outcome: watch::Sender::new(None),
            limits,
            load: Arc::default(),
            recent_prefixes: RecentPrefixes::new(),
            metrics: Metrics::new(),
        }
    }

    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Records the end of the engine's thread.
    pub fn end(&self, outcome: Result<(), String>) {
        self.outcome.send_replace(Some(outcome));
    }

    /// Waits for the end of the engine's thread.
    pub async fn ended(&self) {
        // The wait cannot fail, because `self` owns the sender.
        let _ = self.outcome.subscribe().wait_for(Option::is_some).await;
    }

    /// Waits for a failure of the engine's thread. Does not complete if the thread ends without a failure.
    pub async fn failed(&self) {
        let failed = |outcome: &Option<Result<(), String>>| matches!(outcome, Some(Err(_)));
        // The wait cannot fail, because `self` owns the sender.
        let _ = self.outcome.subscribe().wait_for(failed).await;
    }

    /// The reason why the engine's thread failed, or `None` if it has not failed.
    pub fn failure(&self) -> Option<String> {
        match &*self.outcome.borrow() {
            Some(Err(reason)) => Some(reason.clone()),
            _ => None,
        }
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Frees the places of `count` requests in the queue.
    pub fn leave_queue(&self, count: usize) {
        let before = self.waiting.fetch_sub(count, Ordering::SeqCst);
        self.metrics.queued.set((before - count) as i64);
    }

    /// Returns the largest number of tokens for which the KV cache may allocate memory. The KV cache holds `answers`
    /// answers of at most `longest` tokens each.
    pub fn slots(answers: usize, longest: usize) -> usize {
        Batch::largest_slots(answers, longest)
    }

    /// True if the queue can take a request.
    pub fn has_room_in_queue(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) < self.limits.max_queue
    }

    /// Takes a place in the queue. Returns false if the queue is full.
    pub fn enter_queue(&self) -> bool {
        let most = self.limits.max_queue;
        let entered = self
            .waiting
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |waiting| {
                (waiting < most).then_some(waiting + 1)
            });
        if let Ok(before) = entered {
            self.metrics.queued.set((before + 1) as i64);
        }
        entered.is_ok()
    }
}
