//! The events of a request's answers. Each event is also recorded in the log of requests.

use super::request_log::RequestLog;
use crate::engine::{AnswerEvents, Event};

/// The events of a request. Dropping the events cancels the request.
#[derive(Debug)]
pub(crate) struct Events {
    answers: AnswerEvents,
    log: RequestLog,
}

impl Events {
    pub fn new(answers: AnswerEvents, log: RequestLog) -> Self {
        Self { answers, log }
    }

    /// Waits for the next event: see [`AnswerEvents::next`].
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.answers.next().await?;
        match &event {
            Event::Text { .. } | Event::ToolCall { .. } => self.log.has_token(),
            Event::End { usage, .. } => {
                self.log.has_token();
                self.log.ended(*usage);
            }
            Event::Failed(error) => self.log.failed(&error.message),
        }
        Some(event)
    }
}
