//! Files of requests: one JSON object per line, answered by the same engine as the server's requests.
//!
//! A line has one of three forms. The output has one line per request, in the same order.
//!
//! | form | example |
//! |---|---|
//! | a prompt | `{"prompt": "Once", "max_tokens": 20}`, with the fields of `/v1/completions` |
//! | a conversation | `{"messages": [{"role": "user", "content": "Hi"}]}`, with the fields of `/v1/chat/completions` |
//! | OpenAI's batch form | `{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}` |

use crate::batch_retries::BatchRetries;
use crate::engine::EngineOptions;
use crate::http::{MAX_PROMPTS, MediaOptions, Server, ServerOptions};
use axum::{
    Router,
    body::{Body, to_bytes},
    http::Request,
};
use burn_gemma4::{Gemma4, Gemma4Error};
use futures_util::stream::{self, StreamExt};
use serde_json::{Map, Value, json};
use std::io::{BufRead, Write};
use tower::ServiceExt;

/// The number of lines that are read in advance, in addition to the `max_running` requests that the engine decodes.
const AHEAD: usize = 16;

/// The numbers of requests and tokens in a processed file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// The number of answered requests.
    pub answered: usize,
    /// The number of refused or failed requests.
    pub failed: usize,
    /// The number of prompt tokens of all answered requests.
    pub prompt_tokens: u64,
    /// The number of generated tokens of all answers.
    pub generated_tokens: u64,
}

/// An error that stops the processing of a file.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// The engine did not start.
    #[error(transparent)]
    Engine(#[from] Gemma4Error),
    /// The engine failed. The text is the reason.
    #[error("{0}")]
    Failed(String),
    /// The input cannot be read, or the output cannot be written.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// Answers all requests of `input`, and writes one line for each request to `output`. A request that lacks a field of
/// `defaults` gets this field from `defaults`. `media` are the limits of images and audio in requests. The function
/// stops reading requests when `is_cancelled` returns true.
///
/// # Errors
/// Returns an error if the engine fails, or if reading or writing fails. A malformed request is not an error: its output
/// line holds the error message.
pub fn run_batch_file(
    gemma: Gemma4,
    engine: EngineOptions,
    media: MediaOptions,
    input: impl BufRead + Send,
    mut output: impl Write,
    defaults: &Map<String, Value>,
    is_cancelled: impl Fn() -> bool,
) -> Result<BatchCounts, BatchError> {
    let concurrency = engine.max_running + AHEAD;
    let engine = EngineOptions {
        // Let the queue hold all concurrent requests. A completions request has up to `MAX_PROMPTS` prompts, and each prompt
        // counts as a queued request.
        max_queue: engine.max_queue.max(concurrency * MAX_PROMPTS),
        ..engine
    };
    let options = ServerOptions {
        media,
        ..ServerOptions::default()
    };
    let (model, longest) = (options.model.clone(), options.max_body);
    let server = Server::new(gemma, engine, options)?;
    let router = server.router();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let mut counts = BatchCounts::default();
    let lines = input
        .lines()
        .enumerate()
        .filter(|(_, line)| !matches!(line, Ok(line) if line.trim().is_empty()))
        .take_while(|_| !is_cancelled());
    let retries = BatchRetries::default();
    let answers = stream::iter(lines).map(|(index, line)| {
        let (router, model, retries) = (&router, model.as_str(), &retries);
        async move {
            let line = line?;
            if line.len() > longest {
                return Ok(too_long(index, line.len(), longest));
            }
            let attempt = || answer(router.clone(), index, &line, defaults, model);
            // The images of other lines may take all memory.
            let is_refused = |answer: &Value| answer["response"]["status_code"] == 429;
            retries.answer(attempt, is_refused).await
        }
    });
    runtime.block_on(async {
        let mut answers = std::pin::pin!(answers.buffered(concurrency));
        while let Some(answer) = answers.next().await {
            let answer: Value = answer.map_err(BatchError::Io)?;
            if let Some(failure) = server.engines().failure() {
                return Err(BatchError::Failed(failure.message));
            }
            count(&answer, &mut counts);
            writeln!(output, "{answer}")?;
        }
        output.flush()?;
        Ok(counts)
    })
}

fn count(answer: &Value, counts: &mut BatchCounts) {
    match answer["response"]["status_code"] == 200 {
        true => counts.answered += 1,
        false => counts.failed += 1,
    }
    let usage = &answer["response"]["body"]["usage"];
    counts.prompt_tokens += usage["prompt_tokens"].as_u64().unwrap_or(0);
    counts.generated_tokens += usage["completion_tokens"].as_u64().unwrap_or(0);
}

/// Answers the request in an input line, and returns the output line.
async fn answer(
    router: Router,
    index: usize,
    line: &str,
    defaults: &Map<String, Value>,
    model: &str,
) -> Result<Value, std::io::Error> {
    let number = format!("line-{}", index + 1);
    let (id, path, mut body) = match parse(line, number.clone()) {
        Ok(request) => request,
        Err(reason) => return Ok(failed(&number, &format!("line {}: {reason}", index + 1))),
    };
    for (name, value) in defaults {
        let name = match (path.as_str(), name.as_str()) {
            ("/v1/responses", "max_tokens") => "max_output_tokens",
            (_, name) => name,
        };
        body.entry(name).or_insert_with(|| value.clone());
    }
    body.insert("model".into(), json!(model));
    if body.get("stream") == Some(&json!(true)) {
        return Ok(failed(&id, "stream: is true; expected false in a file"));
    }
    let request = Request::post(&path)
        .header("content-type", "application/json")
        .body(Body::from(Value::Object(body).to_string()))
        .map_err(std::io::Error::other)?;
    let response = router
        .oneshot(request)
        .await
        .unwrap_or_else(|never| match never {});
    let status = response.status().as_u16();
    let bytes = to_bytes(response.into_body(), usize::MAX)
        .await
        .map_err(std::io::Error::other)?;
    let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    Ok(json!({
        "custom_id": id, "response": {"status_code": status, "body": body}, "error": null,
    }))
}

/// Returns the id, the path and the body of the request in an input line. If the request has no `custom_id`, its id is
/// `number`.
fn parse(line: &str, number: String) -> Result<(String, String, Map<String, Value>), String> {
    let value: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let Value::Object(mut fields) = value else {
        return Err("expected a JSON object".into());
    };
    let id = match fields.remove("custom_id") {
        None => number,
        Some(Value::String(id)) => id,
        Some(_) => return Err("custom_id: expected a text".into()),
    };
    let chat = "/v1/chat/completions";
    if let Some(url) = fields.remove("url") {
        let known = [chat, "/v1/completions", "/v1/responses"];
        let path = known.into_iter().find(|path| url == *path);
        let path =
            path.ok_or_else(|| format!("url: {url} is not supported; expected one of {known:?}"))?;
        if fields.get("method").is_some_and(|method| method != "POST") {
            return Err("method: expected \"POST\"".into());
        }
        return match fields.remove("body") {
            Some(Value::Object(body)) => Ok((id, path.into(), body)),
            _ => Err("body: expected a JSON object".into()),
        };
    }
    let path = match (
        fields.contains_key("messages"),
        fields.contains_key("prompt"),
    ) {
        (true, false) => chat,
        (false, true) => "/v1/completions",
        _ => return Err("expected `prompt`, `messages`, or `url` with `body`".into()),
    };
    Ok((id, path.into(), fields))
}

/// Returns the output line for an input line of more than `longest` bytes.
fn too_long(index: usize, count: usize, longest: usize) -> Value {
    let number = index + 1;
    let message = format!("line {number}: has {count} bytes; expected at most {longest}");
    failed(&format!("line-{number}"), &message)
}

fn failed(id: &str, message: &str) -> Value {
    json!({
        "custom_id": id, "response": null,
        "error": {"code": "invalid_request", "message": message},
    })
}
