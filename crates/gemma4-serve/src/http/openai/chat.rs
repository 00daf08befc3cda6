//! The handler of `/v1/chat/completions`.

use super::super::answers::{Call, CompleteAnswer, Part, collect};
use super::super::app::{App, now};
use super::super::body::read_json;
use super::super::form::Form;
use super::super::request_log::RequestLog;
use super::super::stream::{Message, StreamWriter, respond};
use super::chat_request::{ChatContext, ChatRequest};
use super::logprobs;
use crate::engine::{AnswerUsage, EndReason, Event};
use crate::error::RequestError;
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
pub(crate) const CALL_PREFIX: &str = "call_";

/// Handles a request to `/v1/chat/completions`.
pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    Extension(log): Extension<RequestLog>,
    request: Request<Body>,
) -> Response {
    Form::OpenAi.reply(answer(app, log, request).await)
}

async fn answer(
    app: Arc<App>,
    log: RequestLog,
    request: Request<Body>,
) -> Result<Response, RequestError> {
    let (request, memory) = read_json::<ChatRequest>(request, &*app).await?;
    let (events, prompt_tokens, context) = app
        .submit(&log, memory, |app, client| request.prepare(app, client))
        .await?;
    let id = log.id("chatcmpl-");
    let writer = ChatWriter::new(app.clone(), id, context, prompt_tokens);
    if writer.context.stream {
        return Ok(respond(app.options.heartbeat, events, writer));
    }
    let answers = collect(events, writer.context.choices, CALL_PREFIX).await?;
    Ok(Json(writer.complete(&answers)).into_response())
}

/// Returns OpenAI's name for the reason why an answer ended.
pub(crate) fn finish_reason(reason: &EndReason, has_calls: bool) -> &'static str {
    match reason {
        EndReason::Length => "length",
        _ if has_calls => "tool_calls",
        EndReason::Stop | EndReason::StopString(_) => "stop",
    }
}

/// The state of one of the `n` answers in a stream.
#[derive(Clone, Debug, Default)]
struct Choice {
    calls: usize,
    has_ended: bool,
}

struct ChatWriter {
    app: Arc<App>,
    context: ChatContext,
    id: String,
    created: u64,
    prompt_tokens: usize,
    usage: AnswerUsage,
    choices: Vec<Choice>,
}

impl ChatWriter {
    fn new(app: Arc<App>, id: String, context: ChatContext, prompt_tokens: usize) -> Self {
        Self {
            app,
            id,
            created: now().as_secs(),
            prompt_tokens,
            usage: AnswerUsage::default(),
            choices: vec![Choice::default(); context.choices],
            context,
        }
    }

    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": kind, "created": self.created, "model": self.context.model,
            "choices": choices,
        })
    }

    fn usage(&self, usage: AnswerUsage) -> Value {
        let AnswerUsage {
            cached_tokens,
            tokens,
            thinking_tokens,
        } = usage;
        json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": thinking_tokens},
        })
    }

    fn complete(&self, answers: &[CompleteAnswer]) -> Value {
        let choices = answers.iter().enumerate().map(|(index, answer)| {
            let calls: Vec<Value> = answer.calls().map(call_json).collect();
            let (text, thoughts) = (answer.text(), answer.thoughts());
            let mut message = json!({"role": "assistant", "content": text, "refusal": null});
            if !thoughts.is_empty() {
                message["reasoning_content"] = json!(thoughts);
            }
            if !calls.is_empty() {
                if text.is_empty() {
                    message["content"] = Value::Null;
                }
                message["tool_calls"] = json!(calls);
            }
            let reason = answer.end.as_ref().unwrap_or(&EndReason::Stop);
            let logprobs = self.logprobs(&answer.logprobs);
            json!({
                "index": index, "message": message, "logprobs": logprobs,
                "finish_reason": finish_reason(reason, !calls.is_empty()),
            })
        });
        let mut object = self.object("chat.completion", choices.collect());
        object["usage"] = self.usage(answers.iter().map(|answer| answer.usage).sum());
        object
    }

    fn logprobs(&self, tokens: &[crate::engine::TokenProbability]) -> Value {
        match self.context.has_logprobs {
            true => logprobs::of_chat(&self.app.text.tokenizer, tokens),
            false => Value::Null,
        }
    }

    fn chunk(&self, choice: usize, delta: Value, logprobs: Value, reason: Option<&str>) -> Message {
        let choice = json!({
            "index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason,
        });
        let mut object = self.object("chat.completion.chunk", json!([choice]));
        if self.context.include_usage {
            object["usage"] = Value::Null;
        }
        Message::data(&object)
    }

    fn part(&mut self, choice: usize, part: Part, logprobs: Value) -> Message {
        let delta = match part {
            Part::Text(text) => json!({"content": text}),
            Part::Thought(text) => json!({"reasoning_content": text}),
            Part::Call(call) => {
                let mut value = call_json(&call);
                value["index"] = json!(self.choices[choice].calls);
                self.choices[choice].calls += 1;
                json!({"tool_calls": [value]})
            }
        };
        self.chunk(choice, delta, logprobs, None)
    }
}

fn call_json(call: &Call) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": call.id, "type": "function", "function": function})
}

impl StreamWriter for ChatWriter {
    fn begin(&mut self) -> Vec<Message> {
        let first = |choice| {
            let delta = json!({"role": "assistant", "content": ""});
            self.chunk(choice, delta, Value::Null, None)
        };
        (0..self.context.choices).map(first).collect()
    }

    fn event(&mut self, event: Event) -> Vec<Message> {
        match event {
            Event::Text {
                choice,
                kind,
                text,
                logprobs,
            } => {
                let logprobs = match logprobs.is_empty() {
                    true => Value::Null,
                    false => self.logprobs(&logprobs),
                };
                vec![self.part(choice, Part::of_text(kind, text), logprobs)]
            }
            Event::ToolCall { choice, text } => {
                vec![self.part(choice, Part::of_call(text, CALL_PREFIX), Value::Null)]
            }
            Event::End {
                choice,
                reason,
                usage,
            } => {
                self.usage.add(usage);
                self.choices[choice].has_ended = true;
                let reason = finish_reason(&reason, self.choices[choice].calls > 0);
                vec![self.chunk(choice, json!({}), Value::Null, Some(reason))]
            }
            Event::Failed(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &RequestError) -> Vec<Message> {
        vec![Message::data(&Form::OpenAi.body(error))]
    }

    fn end(&mut self) -> Vec<Message> {
        let mut messages = Vec::new();
        if self.context.include_usage {
            let mut object = self.object("chat.completion.chunk", json!([]));
            object["usage"] = self.usage(self.usage);
            messages.push(Message::data(&object));
        }
        messages.push(Message::done());
        messages
    }

    fn has_ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.has_ended)
    }
}
