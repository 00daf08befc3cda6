//! The load of an engine: what its requests can still need. A request counts from its submission until its last answer
//! ends, in the queue as well as in the batch.

use super::request::Event;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc::{UnboundedSender, error::SendError};

/// The load of an engine.
#[derive(Debug, Default)]
pub(super) struct EngineLoad {
    answers: AtomicUsize,
    tokens: AtomicUsize,
}

impl EngineLoad {
    /// Counts a request with `answers` answers of at most `tokens` tokens each, including the prompt.
    pub fn add(self: &Arc<Self>, answers: usize, tokens: usize) -> LoadShare {
        let tokens = answers.saturating_mul(tokens);
        self.answers.fetch_add(answers, Ordering::SeqCst);
        self.tokens.fetch_add(tokens, Ordering::SeqCst);
        LoadShare {
            load: self.clone(),
            answers,
            tokens,
        }
    }

    /// Returns the share of an engine that this load takes: 1 for an engine whose batch or KV cache is full, and more if
    /// requests wait.
    pub fn occupancy(&self, max_running: usize, kv_tokens: usize) -> f64 {
        let share =
            |used: &AtomicUsize, all: usize| used.load(Ordering::SeqCst) as f64 / all.max(1) as f64;
        share(&self.answers, max_running).max(share(&self.tokens, kv_tokens))
    }
}

/// The load of one request. Dropping this value ends the load.
#[derive(Debug)]
pub(super) struct LoadShare {
    load: Arc<EngineLoad>,
    answers: usize,
    tokens: usize,
}

impl Drop for LoadShare {
    fn drop(&mut self) {
        self.load.answers.fetch_sub(self.answers, Ordering::SeqCst);
        self.load.tokens.fetch_sub(self.tokens, Ordering::SeqCst);
    }
}

/// The sender of a request's events. The engine keeps a clone for each answer in progress, so the request's load ends
/// with its last answer.
#[derive(Clone, Debug)]
pub(super) struct EventSender {
    sender: UnboundedSender<Event>,
    _share: Arc<LoadShare>,
}

impl EventSender {
    pub fn new(sender: UnboundedSender<Event>, share: LoadShare) -> Self {
        Self {
            sender,
            _share: Arc::new(share),
        }
    }

    /// Sends an event to the client.
    ///
    /// # Errors
    /// Returns the event if the client has disconnected.
    pub fn send(&self, event: Event) -> Result<(), SendError<Event>> {
        self.sender.send(event)
    }

    /// True if the client has disconnected.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc::unbounded_channel;

    #[test]
    fn load_of_a_request_ends_with_its_last_sender() {
        let load = Arc::<EngineLoad>::default();
        let (sender, _receiver) = unbounded_channel();
        let sender = EventSender::new(sender, load.add(2, 100));
        // 2 of 8 answers are a larger share than 200 of 1000 tokens, and a smaller share than 200 of 400 tokens.
        assert_eq!(load.occupancy(8, 1000), 0.25);
        assert_eq!(load.occupancy(8, 400), 0.5);
        let other = sender.clone();
        drop(sender);
        assert_eq!(load.occupancy(8, 1000), 0.25);
        drop(other);
        assert_eq!(load.occupancy(8, 1000), 0.0);
    }
}
