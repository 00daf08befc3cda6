//! The handlers of `/v1/messages` and `/v1/messages/count_tokens`.

use super::super::answers::{CompleteAnswer, Part, collect};
use super::super::app::App;
use super::super::body::read_json;
use super::super::client_state::ClientGuard;
use super::super::form::Form;
use super::super::request_log::RequestLog;
use super::super::stream::respond;
use super::request::MessagesRequest;
use super::writer::MessageWriter;
use crate::engine::{AnswerUsage, EndReason};
use crate::error::{ErrorKind, RequestError};
use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::sync::Arc;

/// The prefix of the ids of tool calls.
pub(super) const CALL_PREFIX: &str = "toolu_";

/// Handles a request to `/v1/messages`.
pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    Extension(log): Extension<RequestLog>,
    request: Request<Body>,
) -> Response {
    Form::Anthropic.reply(answer(app, log, request).await)
}

/// Handles a request to `/v1/messages/count_tokens`.
pub(crate) async fn count(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    let counted = async {
        let (request, memory) = read_json::<MessagesRequest>(request, &*app).await?;
        let app = app.clone();
        // The guard lives until the client leaves, or until the tokens have been counted.
        let guard = ClientGuard::default();
        let client = guard.state();
        let counted = move || {
            let counted = request.count_tokens(&app, &client);
            drop(memory);
            counted
        };
        let counted = tokio::task::spawn_blocking(counted).await;
        drop(guard);
        counted
            .unwrap_or_else(|error| Err(RequestError::new(ErrorKind::Internal, error.to_string())))
    };
    match counted.await {
        Ok(count) => Json(json!({"input_tokens": count})).into_response(),
        Err(error) => Form::Anthropic.response(&error),
    }
}

async fn answer(
    app: Arc<App>,
    log: RequestLog,
    request: Request<Body>,
) -> Result<Response, RequestError> {
    let (request, memory) = read_json::<MessagesRequest>(request, &*app).await?;
    let (events, prompt_tokens, context) = app
        .submit(&log, memory, |app, client| request.prepare(app, client))
        .await?;
    let id = log.id("msg_");
    if context.stream {
        let writer = MessageWriter::new(id, context.model, prompt_tokens);
        return Ok(respond(app.options.heartbeat, events, writer));
    }
    let mut answers = collect(events, 1, CALL_PREFIX).await?;
    let answer = answers.pop().unwrap_or_default();
    Ok(Json(complete(id, context.model, &answer, prompt_tokens)).into_response())
}

/// Returns Anthropic's name for the reason why an answer ended, and the stop string or null.
pub(super) fn stop_reason(reason: &EndReason, has_calls: bool) -> (&'static str, Value) {
    match reason {
        EndReason::StopString(string) => ("stop_sequence", json!(**string)),
        EndReason::Length => ("max_tokens", Value::Null),
        EndReason::Stop if has_calls => ("tool_use", Value::Null),
        EndReason::Stop => ("end_turn", Value::Null),
    }
}

fn complete(id: String, model: String, answer: &CompleteAnswer, prompt_tokens: usize) -> Value {
    let content = answer.parts.iter().map(|part| match part {
        Part::Text(text) => json!({"type": "text", "text": text}),
        Part::Thought(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Part::Call(call) => {
            let input: Value = serde_json::from_str(&call.arguments).unwrap_or_default();
            json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
        }
    });
    let end = answer.end.as_ref().unwrap_or(&EndReason::Stop);
    let (reason, string) = stop_reason(end, answer.calls().next().is_some());
    json!({
        "id": id, "type": "message", "role": "assistant", "model": model,
        "content": content.collect::<Value>(), "stop_reason": reason, "stop_sequence": string,
        "usage": usage_json(prompt_tokens, answer.usage),
    })
}

/// Returns the numbers of tokens. In this API, cached tokens do not count as input tokens.
pub(super) fn usage_json(prompt_tokens: usize, usage: AnswerUsage) -> Value {
    json!({
        "input_tokens": prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.tokens,
    })
}
