//! Writes an answer of `/v1/responses` as a stream of events or as one JSON object.

use super::super::answers::{Call, Part};
use super::super::app::{new_id, now};
use super::super::form::Form;
use super::super::stream::{Message, StreamWriter};
use super::chat::CALL_PREFIX;
use super::responses_request::ResponsesContext;
use crate::engine::{AnswerUsage, EndReason, Event};
use crate::error::RequestError;
use serde_json::{Value, json};

/// The type of an output item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Thought,
}

/// An output item that still receives text.
struct OpenItem {
    kind: Kind,
    id: String,
    text: String,
}

impl OpenItem {
    fn part(&self, text: &str) -> Value {
        match self.kind {
            Kind::Text => {
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
            }
            Kind::Thought => json!({"type": "reasoning_text", "text": text}),
        }
    }

    fn item(&self, status: &str, content: Vec<Value>) -> Value {
        match self.kind {
            Kind::Text => json!({
                "id": self.id, "type": "message", "status": status, "role": "assistant", "content": content,
            }),
            Kind::Thought => json!({
                "id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content,
            }),
        }
    }

    fn event_name(&self, end: &str) -> String {
        match self.kind {
            Kind::Text => format!("response.output_text.{end}"),
            Kind::Thought => format!("response.reasoning_text.{end}"),
        }
    }
}

pub(super) struct ResponseWriter {
    id: String,
    created: u64,
    context: ResponsesContext,
    prompt_tokens: usize,
    output: Vec<Value>,
    open: Option<OpenItem>,
    end: Option<(EndReason, AnswerUsage)>,
    failure: Option<Value>,
    sequence: usize,
}

impl ResponseWriter {
    pub fn new(id: String, context: ResponsesContext, prompt_tokens: usize) -> Self {
        Self {
            id,
            created: now().as_secs(),
            context,
            prompt_tokens,
            output: Vec::new(),
            open: None,
            end: None,
            failure: None,
            sequence: 0,
        }
    }

    /// Returns the JSON object of the response with the output so far.
    pub fn response(&self) -> Value {
        let (status, details) = match &self.end {
            _ if self.failure.is_some() => ("failed", Value::Null),
            None => ("in_progress", Value::Null),
            Some((EndReason::Length, _)) => ("incomplete", json!({"reason": "max_output_tokens"})),
            Some(_) => ("completed", Value::Null),
        };
        let usage = self.end.as_ref().map(|(_, usage)| {
            json!({
                "input_tokens": self.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.tokens,
                "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
                "total_tokens": self.prompt_tokens + usage.tokens,
            })
        });
        let mut response = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "background": false, "error": self.failure, "incomplete_details": details, "model": self.context.model,
            "output": self.output, "previous_response_id": null, "store": false, "tool_choice": "auto",
            "truncation": "disabled", "usage": usage,
        });
        if let (Some(response), Some(fields)) =
            (response.as_object_mut(), self.context.fields.as_object())
        {
            let fields = fields
                .iter()
                .map(|(name, value)| (name.clone(), value.clone()));
            response.extend(fields);
        }
        response
    }

    fn message(&mut self, name: String, mut data: Value) -> Message {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        Message::owned_name(name, &data)
    }

    /// Completes the open output item, and moves the item to the output.
    fn close(&mut self, messages: &mut Vec<Message>) {
        let Some(open) = self.open.take() else {
            return;
        };
        let index = self.output.len();
        let part = open.part(&open.text);
        let item = open.item("completed", vec![part.clone()]);
        let of_part = json!({"item_id": open.id, "output_index": index, "content_index": 0});
        let with = |name: &str, value: Value| {
            let mut data = of_part.clone();
            data[name] = value;
            data
        };
        let mut text = with("text", json!(open.text));
        if open.kind == Kind::Text {
            text["logprobs"] = json!([]);
        }
        messages.push(self.message(open.event_name("done"), text));
        let name = "response.content_part.done".to_owned();
        messages.push(self.message(name, with("part", part)));
        let name = "response.output_item.done".to_owned();
        messages.push(self.message(name, json!({"output_index": index, "item": item})));
        self.output.push(item);
    }

    /// Appends text to the open output item. If no item of this kind is open, first completes any open item and starts a new
    /// item.
    fn text(&mut self, kind: Kind, text: &str, messages: &mut Vec<Message>) {
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.close(messages);
            let prefix = match kind {
                Kind::Text => "msg_",
                Kind::Thought => "rs_",
            };
            let open = OpenItem {
                kind,
                id: new_id(prefix),
                text: String::new(),
            };
            let index = self.output.len();
            let data = json!({"output_index": index, "item": open.item("in_progress", Vec::new())});
            messages.push(self.message("response.output_item.added".into(), data));
            let data = json!({
                "item_id": open.id, "output_index": index, "content_index": 0, "part": open.part(""),
            });
            messages.push(self.message("response.content_part.added".into(), data));
            self.open = Some(open);
        }
        let index = self.output.len();
        if let Some(open) = &mut self.open {
            open.text += text;
            let mut data = json!({
                "item_id": open.id, "output_index": index, "content_index": 0, "delta": text,
            });
            if kind == Kind::Text {
                data["logprobs"] = json!([]);
            }
            let name = open.event_name("delta");
            messages.push(self.message(name, data));
        }
    }

    fn call(&mut self, call: &Call, messages: &mut Vec<Message>) {
        self.close(messages);
        let (index, id) = (self.output.len(), new_id("fc_"));
        let item = |status: &str, arguments: &str| {
            json!({
                "id": id, "type": "function_call", "status": status, "call_id": call.id, "name": call.name,
                "arguments": arguments,
            })
        };
        let data = json!({"output_index": index, "item": item("in_progress", "")});
        messages.push(self.message("response.output_item.added".into(), data));
        let data = json!({"item_id": id, "output_index": index, "delta": call.arguments});
        messages.push(self.message("response.function_call_arguments.delta".into(), data));
        let data = json!({
            "item_id": id, "output_index": index, "arguments": call.arguments, "name": call.name,
        });
        messages.push(self.message("response.function_call_arguments.done".into(), data));
        let item = item("completed", &call.arguments);
        let data = json!({"output_index": index, "item": item});
        messages.push(self.message("response.output_item.done".into(), data));
        self.output.push(item);
    }

    fn part(&mut self, part: Part) -> Vec<Message> {
        let mut messages = Vec::new();
        match part {
            Part::Text(text) if text.is_empty() => (),
            Part::Text(text) => self.text(Kind::Text, &text, &mut messages),
            Part::Thought(text) => self.text(Kind::Thought, &text, &mut messages),
            Part::Call(call) => self.call(&call, &mut messages),
        }
        messages
    }
}

impl StreamWriter for ResponseWriter {
    fn begin(&mut self) -> Vec<Message> {
        let names = ["response.created", "response.in_progress"];
        let message = |name: &str| {
            let data = json!({"response": self.response()});
            self.message(name.into(), data)
        };
        names.map(message).into()
    }

    fn event(&mut self, event: Event) -> Vec<Message> {
        match event {
            Event::Text { kind, text, .. } => self.part(Part::of_text(kind, text)),
            Event::ToolCall { text, .. } => self.part(Part::of_call(text, CALL_PREFIX)),
            Event::End { reason, usage, .. } => {
                let mut messages = Vec::new();
                self.close(&mut messages);
                self.end = Some((reason, usage));
                messages
            }
            Event::Failed(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &RequestError) -> Vec<Message> {
        let mut messages = Vec::new();
        self.close(&mut messages);
        let body = Form::OpenAi.body(error);
        self.failure = Some(json!({"code": "server_error", "message": body["error"]["message"]}));
        let data = json!({"response": self.response()});
        messages.push(self.message("response.failed".into(), data));
        messages
    }

    fn end(&mut self) -> Vec<Message> {
        let name = match &self.end {
            Some((EndReason::Length, _)) => "response.incomplete",
            _ => "response.completed",
        };
        let data = json!({"response": self.response()});
        vec![self.message(name.into(), data)]
    }

    fn has_ended(&self) -> bool {
        self.end.is_some()
    }
}
