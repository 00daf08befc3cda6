//! The events of a request's answers. Each event is also recorded in the log of requests.

use super::request_log::RequestLog;
use crate::engine::{Engine, Event};
use tokio::sync::mpsc::UnboundedReceiver;

/// The events of a request. Dropping the events cancels the request.
#[derive(Debug)]
pub(crate) struct Events {
    receiver: UnboundedReceiver<Event>,
    engine: Engine,
    log: RequestLog,
}

impl Events {
    pub fn new(receiver: UnboundedReceiver<Event>, engine: Engine, log: RequestLog) -> Self {
        Self {
            receiver,
            engine,
            log,
        }
    }

    /// Waits for the next event. If the channel of events ends before the answer is complete, returns an event with the
    /// error.
    pub async fn next(&mut self) -> Event {
        let event = match self.receiver.recv().await {
            Some(event) => event,
            None => Event::Failed(self.engine.stopped().await),
        };
        match &event {
            Event::Text { .. } | Event::ToolCall { .. } => self.log.has_token(),
            Event::End { usage, .. } => {
                self.log.has_token();
                self.log.ended(*usage);
            }
            Event::Failed(error) => self.log.failed(&error.message),
        }
        event
    }
}
