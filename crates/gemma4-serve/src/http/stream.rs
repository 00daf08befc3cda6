//! Responses as streams of server-sent events.

use super::events::Events;
use crate::engine::Event;
use crate::error::RequestError;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// A server-sent event: its data, and its name if the API names events.
#[derive(Debug)]
pub(crate) struct Message {
    name: Option<Cow<'static, str>>,
    data: String,
}

impl Message {
    /// Creates an event without a name.
    pub fn data(data: &Value) -> Self {
        Self {
            name: None,
            data: data.to_string(),
        }
    }

    /// Creates an event with a constant name.
    pub fn named(name: &'static str, data: &Value) -> Self {
        Self {
            name: Some(name.into()),
            data: data.to_string(),
        }
    }

    /// Creates an event whose name is computed at run time.
    pub fn owned_name(name: String, data: &Value) -> Self {
        Self {
            name: Some(name.into()),
            data: data.to_string(),
        }
    }

    /// Returns the event `[DONE]`, which ends a stream of OpenAI's completions.
    pub fn done() -> Self {
        Self {
            name: None,
            data: "[DONE]".into(),
        }
    }

    fn into_event(self) -> SseEvent {
        let event = SseEvent::default().data(self.data);
        match self.name {
            Some(name) => event.event(name),
            None => event,
        }
    }
}

/// Converts the engine's events to the server-sent events of an API.
pub(crate) trait StreamWriter: Send + 'static {
    /// Returns the server-sent events at the beginning of the stream.
    fn begin(&mut self) -> Vec<Message>;
    /// Returns the server-sent events for an event of the engine.
    fn event(&mut self, event: Event) -> Vec<Message>;
    /// Returns the server-sent events for an error. The stream then ends.
    fn fail(&mut self, error: &RequestError) -> Vec<Message>;
    /// Returns the server-sent events at the end of the stream.
    fn end(&mut self) -> Vec<Message>;
    /// True if all answers of the request have ended.
    fn has_ended(&self) -> bool;
    /// Returns the server-sent event that serves as a heartbeat. If the method returns `None`, the server sends an
    /// empty comment line instead.
    fn heartbeat(&self) -> Option<Message> {
        None
    }
}

struct State<W> {
    events: Events,
    writer: W,
    pending: VecDeque<Message>,
    is_over: bool,
}

/// Returns the response that streams the events, with heartbeats at the given interval. If the client disconnects, the
/// stream and its events are dropped, which cancels the request.
pub(crate) fn respond(
    heartbeat: Duration,
    events: Events,
    mut writer: impl StreamWriter,
) -> Response {
    let mut keep_alive = KeepAlive::new().interval(heartbeat);
    if let Some(heartbeat) = writer.heartbeat() {
        keep_alive = keep_alive.event(heartbeat.into_event());
    }
    let state = State {
        pending: writer.begin().into(),
        events,
        writer,
        is_over: false,
    };
    let stream = unfold(state, |mut state| async move {
        loop {
            if let Some(message) = state.pending.pop_front() {
                return Some((Ok::<_, Infallible>(message.into_event()), state));
            }
            if state.is_over {
                return None;
            }
            let messages = match state.events.next().await? {
                Event::Failed(error) => {
                    state.is_over = true;
                    state.writer.fail(&error)
                }
                event => {
                    let mut messages = state.writer.event(event);
                    if state.writer.has_ended() {
                        state.is_over = true;
                        messages.extend(state.writer.end());
                    }
                    messages
                }
            };
            state.pending.extend(messages);
        }
    });
    Sse::new(stream).keep_alive(keep_alive).into_response()
}
