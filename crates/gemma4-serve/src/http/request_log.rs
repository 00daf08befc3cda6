//! The log of requests: one line of JSON for each request to an API.

use super::app::{HttpApp, now};
use super::form::{ErrorText, Form};
use crate::engine::AnswerUsage;
use axum::{
    body::Body,
    extract::State,
    http::{HeaderValue, Request},
    middleware::Next,
    response::Response,
};
use log::Level;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The `log` target of the request log. The text of each log record is a JSON object that describes one request.
pub const LOG_TARGET: &str = "gemma4_serve::requests";

/// The log entry of one request. All clones refer to one entry, which is logged when the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct RequestLog(Arc<Entry>);

#[derive(Debug)]
struct Entry {
    id: String,
    api: &'static str,
    model: String,
    time: f64,
    started: Instant,
    state: Mutex<Progress>,
}

/// The part of a log entry that changes while the server answers the request.
#[derive(Debug, Default)]
struct Progress {
    /// The HTTP status of the response, or `None` until the response begins.
    status: Option<u16>,
    error: Option<String>,
    /// The name of the model with the adapter that the request selects, or `None` without an adapter.
    adapted: Option<String>,
    prompt_tokens: usize,
    /// The number of prompt tokens whose keys and values came from an earlier prompt.
    cached_tokens: usize,
    output_tokens: usize,
    first_token: Option<Duration>,
    /// The number of this request's answers that have not ended.
    open: usize,
}

impl RequestLog {
    fn new(api: &'static str, model: String) -> Self {
        Self(Arc::new(Entry {
            id: format!("{:032x}", rand::random::<u128>()),
            api,
            model,
            time: now().as_secs_f64(),
            started: Instant::now(),
            state: Mutex::default(),
        }))
    }

    /// Returns the id of the request, with a prefix such as `chatcmpl-`.
    pub fn id(&self, prefix: &str) -> String {
        format!("{prefix}{}", self.0.id)
    }

    /// Records the name of the model with the selected adapter.
    pub fn selected(&self, model: &str) {
        self.change(|state| state.adapted = Some(model.to_owned()));
    }

    /// Records that a prompt was submitted to the engine. `prompt_tokens` is the length of the prompt. `answers` is the
    /// number of answers that the engine generates for the prompt.
    pub fn submitted(&self, prompt_tokens: usize, answers: usize) {
        self.change(|state| {
            state.prompt_tokens += prompt_tokens;
            state.open += answers;
        });
    }

    /// Records the time of the request's first token, unless an earlier token was recorded.
    pub fn has_token(&self) {
        let waited = self.0.started.elapsed();
        self.change(|state| _ = state.first_token.get_or_insert(waited));
    }

    /// Records the end of an answer.
    pub fn ended(&self, usage: AnswerUsage) {
        self.change(|state| {
            state.cached_tokens += usage.cached_tokens;
            state.output_tokens += usage.tokens;
            state.open = state.open.saturating_sub(1);
        });
    }

    /// Records a failure that occurred after the response had begun.
    pub fn failed(&self, message: &str) {
        self.change(|state| state.error = Some(message.to_owned()));
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        // A poisoned lock is ignored: the state is consistent even after a panic, because each change is a few
        // assignments.
        change(&mut self.0.state.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Progress {
    fn outcome(&self) -> &'static str {
        match self.status {
            None => "cancelled",
            Some(400..=499 | 503) => "refused",
            Some(500..) => "failed",
            Some(_) if self.error.is_some() => "failed",
            Some(_) if self.open > 0 => "cancelled",
            Some(_) => "finished",
        }
    }
}

impl Entry {
    fn json(&self, state: &Progress) -> Value {
        let seconds = |duration: Duration| (duration.as_secs_f64() * 1e6).round() / 1e6;
        json!({
            "time": self.time, "level": "info", "message": "request", "id": self.id, "api": self.api,
            "model": state.adapted.as_ref().unwrap_or(&self.model), "status": state.status,
            "prompt_tokens": state.prompt_tokens,
            "cached_tokens": state.cached_tokens, "output_tokens": state.output_tokens, "time_to_first_token": state.first_token.map(seconds),
            "duration": seconds(self.started.elapsed()), "outcome": state.outcome(), "error": state.error,
        })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if log::log_enabled!(target: LOG_TARGET, Level::Info) {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            log::info!(target: LOG_TARGET, "{}", self.json(&state));
        }
    }
}

/// Returns the name of the API that serves a path, or `None` for the paths that are not logged.
fn api(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" => Some("chat"),
        "/v1/completions" => Some("completions"),
        "/v1/responses" => Some("responses"),
        "/v1/messages" => Some("messages"),
        "/v1/messages/count_tokens" => Some("count_tokens"),
        "/v1/embeddings" => Some("embeddings"),
        _ => None,
    }
}

/// Creates the log entry of a request to an API, and adds the response's status and error to the entry.
pub(crate) async fn log_request<A: HttpApp>(
    State(app): State<Arc<A>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let path = request.uri().path();
    let Some(api) = api(path) else {
        return next.run(request).await;
    };
    let name = Form::of_path(path).id_header();
    let log = RequestLog::new(api, app.options().model.clone());
    request.extensions_mut().insert(log.clone());
    let mut response = next.run(request).await;
    let error = response.extensions_mut().remove::<ErrorText>();
    log.change(|state| {
        state.status = Some(response.status().as_u16());
        state.error = error.map(|ErrorText(text)| text);
    });
    if let Ok(id) = HeaderValue::from_str(&log.0.id) {
        response.headers_mut().insert(name, id);
    }
    response
}
