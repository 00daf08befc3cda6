//! The handler of `/v1/completions`.

use super::super::answers::{CompleteAnswer, collect};
use super::super::app::{App, now};
use super::super::body::read_json;
use super::super::client_state::ClientState;
use super::super::form::Form;
use super::super::request_log::RequestLog;
use super::super::stream::{Message, StreamWriter, respond};
use super::chat::{CALL_PREFIX, finish_reason};
use super::completions_request::{CompletionContext, CompletionRequest};
use super::logprobs;
use crate::engine::{AnswerUsage, EndReason, Event, TokenProbability};
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

/// Handles a request to `/v1/completions`.
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
    let (request, memory) = read_json::<CompletionRequest>(request, &*app).await?;
    let (context, prompts) = request.split()?;
    let adapter = app.select_adapter(context.model())?;
    let mut submitted = Vec::new();
    for prompt in prompts {
        let (context, adapter) = (context.clone(), adapter.clone());
        let prepare =
            move |app: &App, _: &ClientState| Ok((context.request(prompt, adapter, app)?, ()));
        let (events, prompt_tokens, ()) = app.submit(&log, memory.clone(), prepare).await?;
        submitted.push((events, prompt_tokens));
    }
    drop(memory);
    let prompt_tokens = submitted.iter().map(|(_, tokens)| tokens).sum();
    let mut writer = CompletionWriter::new(app.clone(), log.id("cmpl-"), context, prompt_tokens);
    if writer.context.stream
        && let Some((events, _)) = submitted.pop()
    {
        return Ok(respond(app.options.heartbeat, events, writer));
    }
    let mut answers = Vec::new();
    for (events, _) in submitted {
        answers.extend(collect(events, writer.context.choices, CALL_PREFIX).await?);
    }
    Ok(Json(writer.complete(&answers)).into_response())
}

struct CompletionWriter {
    app: Arc<App>,
    context: CompletionContext,
    id: String,
    created: u64,
    prompt_tokens: usize,
    usage: AnswerUsage,
    ended: usize,
    /// The number of characters in each answer so far. The numbers are necessary because the field `logprobs` of a
    /// response gives each token's offset in characters.
    offsets: Vec<usize>,
}

impl CompletionWriter {
    fn new(app: Arc<App>, id: String, context: CompletionContext, prompt_tokens: usize) -> Self {
        Self {
            app,
            id,
            created: now().as_secs(),
            prompt_tokens,
            usage: AnswerUsage::default(),
            ended: 0,
            offsets: vec![0; context.choices],
            context,
        }
    }

    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created,
            "model": self.context.model(), "choices": choices,
        })
    }

    fn usage(&self, usage: AnswerUsage) -> Value {
        let tokens = usage.tokens;
        json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        })
    }

    fn logprobs(&self, tokens: &[TokenProbability], offset: &mut usize) -> Value {
        match self.context.logprobs {
            Some(_) => logprobs::of_text(&self.app.text.tokenizer, tokens, offset),
            None => Value::Null,
        }
    }

    fn complete(&mut self, answers: &[CompleteAnswer]) -> Value {
        let choices = answers.iter().enumerate().map(|(index, answer)| {
            let reason = answer.end.as_ref().unwrap_or(&EndReason::Stop);
            json!({
                "index": index, "text": answer.text(),
                "logprobs": self.logprobs(&answer.logprobs, &mut 0),
                "finish_reason": finish_reason(reason, false),
            })
        });
        let choices = choices.collect();
        let mut object = self.object(choices);
        object["usage"] = self.usage(answers.iter().map(|answer| answer.usage).sum());
        object
    }

    fn chunk(&self, choice: usize, text: &str, logprobs: Value, reason: Option<&str>) -> Message {
        let choice = json!({
            "index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason,
        });
        Message::data(&self.object(json!([choice])))
    }
}

impl StreamWriter for CompletionWriter {
    fn begin(&mut self) -> Vec<Message> {
        Vec::new()
    }

    fn event(&mut self, event: Event) -> Vec<Message> {
        match event {
            Event::Text {
                choice,
                text,
                logprobs,
                ..
            } => {
                let mut offset = self.offsets[choice];
                let logprobs = self.logprobs(&logprobs, &mut offset);
                self.offsets[choice] = offset;
                vec![self.chunk(choice, &text, logprobs, None)]
            }
            Event::ToolCall { choice, text } => vec![self.chunk(choice, &text, Value::Null, None)],
            Event::End {
                choice,
                reason,
                usage,
            } => {
                self.usage.add(usage);
                self.ended += 1;
                let reason = finish_reason(&reason, false);
                vec![self.chunk(choice, "", Value::Null, Some(reason))]
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
            let mut object = self.object(json!([]));
            object["usage"] = self.usage(self.usage);
            messages.push(Message::data(&object));
        }
        messages.push(Message::done());
        messages
    }

    fn has_ended(&self) -> bool {
        self.ended == self.context.choices
    }
}
