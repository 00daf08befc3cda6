//! The load of an engine: the answers that have not ended. An answer counts from the submission of its request until
//! its end, in the queue as well as in the batch.

use super::request::Event;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc::{UnboundedSender, error::SendError};

/// The load of an engine.
#[derive(Debug, Default)]
pub(super) struct EngineLoad(Mutex<Open>);

/// The answers that have not ended.
#[derive(Debug, Default)]
struct Open {
    answers: usize,
    /// The number of answers by their largest possible number of tokens, including the prompt.
    lengths: BTreeMap<usize, usize>,
}

impl EngineLoad {
    fn open(&self) -> MutexGuard<'_, Open> {
        // Ignore a poisoned lock: no change of the counts can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request with `answers` answers of at most `tokens` tokens each, including the prompt.
    pub fn add(self: &Arc<Self>, answers: usize, tokens: usize) -> LoadShare {
        let mut open = self.open();
        open.answers += answers;
        *open.lengths.entry(tokens).or_default() += answers;
        LoadShare {
            load: self.clone(),
            answers: AtomicUsize::new(answers),
            tokens,
        }
    }

    /// Returns the number of answers, and the largest possible number of tokens of one of them.
    pub fn answers(&self) -> (usize, usize) {
        let open = self.open();
        let longest = open.lengths.last_key_value();
        (open.answers, longest.map_or(0, |(tokens, _)| *tokens))
    }

    fn remove(&self, answers: usize, tokens: usize) {
        let mut open = self.open();
        open.answers -= answers;
        if let Some(count) = open.lengths.get_mut(&tokens) {
            *count -= answers;
            if *count == 0 {
                open.lengths.remove(&tokens);
            }
        }
    }
}

/// The load of one request. Dropping this value ends the load.
#[derive(Debug)]
pub(super) struct LoadShare {
    load: Arc<EngineLoad>,
    /// The number of answers that have not ended.
    answers: AtomicUsize,
    tokens: usize,
}

impl LoadShare {
    /// Ends the load of one answer.
    fn end_answer(&self) {
        let less = |answers: usize| answers.checked_sub(1);
        let (set, get) = (Ordering::SeqCst, Ordering::SeqCst);
        if self.answers.fetch_update(set, get, less).is_ok() {
            self.load.remove(1, self.tokens);
        }
    }
}

impl Drop for LoadShare {
    fn drop(&mut self) {
        self.load.remove(*self.answers.get_mut(), self.tokens);
    }
}

/// The sender of a request's events. The engine keeps a clone for each answer in progress. The load of a cancelled or
/// failed request therefore ends with the last clone.
#[derive(Clone, Debug)]
pub(super) struct EventSender {
    sender: UnboundedSender<Event>,
    share: Arc<LoadShare>,
}

impl EventSender {
    pub fn new(sender: UnboundedSender<Event>, share: LoadShare) -> Self {
        Self {
            sender,
            share: Arc::new(share),
        }
    }

    /// Sends an event to the client. The end of an answer ends the answer's load first. A client that then sends the
    /// next request of a conversation finds the load without the answer.
    ///
    /// # Errors
    /// Returns the event if the client has disconnected.
    pub fn send(&self, event: Event) -> Result<(), SendError<Event>> {
        if let Event::End { .. } = event {
            self.share.end_answer();
        }
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
    use crate::engine::request::{AnswerUsage, EndReason};
    use tokio::sync::mpsc::unbounded_channel;

    fn end(choice: usize) -> Event {
        Event::End {
            choice,
            reason: EndReason::Length,
            usage: AnswerUsage::default(),
        }
    }

    #[test]
    fn load_of_an_answer_ends_before_its_last_event() {
        let load = Arc::<EngineLoad>::default();
        let (sender, mut receiver) = unbounded_channel();
        let sender = EventSender::new(sender, load.add(2, 100));
        assert_eq!(load.answers(), (2, 100));
        sender.send(end(0)).expect("the receiver waits");
        assert_eq!(receiver.blocking_recv(), Some(end(0)));
        assert_eq!(load.answers(), (1, 100));
        drop(receiver);
        // The load ends even if the client has disconnected.
        sender.send(end(1)).expect_err("the receiver is gone");
        assert_eq!(load.answers(), (0, 0));
        drop(sender);
        assert_eq!(load.answers(), (0, 0));
    }

    #[test]
    fn load_of_a_cancelled_request_ends_with_its_last_sender() {
        let load = Arc::<EngineLoad>::default();
        let (sender, _receiver) = unbounded_channel();
        let sender = EventSender::new(sender, load.add(2, 100));
        let other = sender.clone();
        let longer = load.add(1, 300);
        assert_eq!(load.answers(), (3, 300));
        drop(sender);
        drop(longer);
        assert_eq!(load.answers(), (2, 100));
        drop(other);
        assert_eq!(load.answers(), (0, 0));
    }
}
