//! Writes an answer as a stream of Anthropic's events.

use super::super::answers::Part;
use super::super::form::Form;
use super::super::stream::{Message, StreamWriter};
use super::messages::{CALL_PREFIX, stop_reason, usage_json};
use crate::engine::{AnswerUsage, Event};
use crate::error::RequestError;
use serde_json::{Value, json};

/// The type of a content block that has been started and not yet stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Text,
    Thinking,
}

pub(super) struct MessageWriter {
    id: String,
    model: String,
    prompt_tokens: usize,
    /// The number of content blocks that have been started.
    blocks: usize,
    open: Option<Open>,
    has_calls: bool,
    has_ended: bool,
}

impl MessageWriter {
    pub fn new(id: String, model: String, prompt_tokens: usize) -> Self {
        Self {
            id,
            model,
            prompt_tokens,
            blocks: 0,
            open: None,
            has_calls: false,
            has_ended: false,
        }
    }

    fn begin_block(&mut self, block: Value) -> Message {
        let index = self.blocks;
        self.blocks += 1;
        let data = json!({"type": "content_block_start", "index": index, "content_block": block});
        Message::named("content_block_start", &data)
    }

    fn delta(&self, delta: Value) -> Message {
        let index = self.blocks.saturating_sub(1);
        let data = json!({"type": "content_block_delta", "index": index, "delta": delta});
        Message::named("content_block_delta", &data)
    }

    fn end_block(&self) -> Message {
        let index = self.blocks.saturating_sub(1);
        let data = json!({"type": "content_block_stop", "index": index});
        Message::named("content_block_stop", &data)
    }

    fn close(&mut self, messages: &mut Vec<Message>) {
        if let Some(open) = self.open.take() {
            if open == Open::Thinking {
                let delta = json!({"type": "signature_delta", "signature": ""});
                messages.push(self.delta(delta));
            }
            messages.push(self.end_block());
        }
    }

    /// Starts a content block of the type `kind`, unless such a block is open. Stops an open block of another type first.
    fn open(&mut self, kind: Open, messages: &mut Vec<Message>) {
        if self.open != Some(kind) {
            self.close(messages);
            let block = match kind {
                Open::Text => json!({"type": "text", "text": ""}),
                Open::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
            };
            messages.push(self.begin_block(block));
            self.open = Some(kind);
        }
    }

    fn part(&mut self, part: Part) -> Vec<Message> {
        let mut messages = Vec::new();
        match part {
            Part::Text(text) if text.is_empty() => (),
            Part::Text(text) => {
                self.open(Open::Text, &mut messages);
                messages.push(self.delta(json!({"type": "text_delta", "text": text})));
            }
            Part::Thought(text) => {
                self.open(Open::Thinking, &mut messages);
                messages.push(self.delta(json!({"type": "thinking_delta", "thinking": text})));
            }
            Part::Call(call) => {
                self.close(&mut messages);
                self.has_calls = true;
                let block =
                    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": {}});
                messages.push(self.begin_block(block));
                let delta = json!({"type": "input_json_delta", "partial_json": call.arguments});
                messages.push(self.delta(delta));
                messages.push(self.end_block());
            }
        }
        messages
    }
}

impl StreamWriter for MessageWriter {
    fn begin(&mut self) -> Vec<Message> {
        let message = json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": null, "stop_sequence": null,
            // The prefill may not have begun, so `cached_tokens` is unknown. `message_delta` has the final numbers.
            "usage": usage_json(self.prompt_tokens, AnswerUsage::default()),
        });
        let data = json!({"type": "message_start", "message": message});
        vec![Message::named("message_start", &data)]
    }

    fn event(&mut self, event: Event) -> Vec<Message> {
        match event {
            Event::Text { kind, text, .. } => self.part(Part::of_text(kind, text)),
            Event::ToolCall { text, .. } => self.part(Part::of_call(text, CALL_PREFIX)),
            Event::End { reason, usage, .. } => {
                let mut messages = Vec::new();
                self.close(&mut messages);
                let (reason, string) = stop_reason(&reason, self.has_calls);
                let data = json!({
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": string},
                    "usage": usage_json(self.prompt_tokens, usage),
                });
                messages.push(Message::named("message_delta", &data));
                self.has_ended = true;
                messages
            }
            Event::Failed(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &RequestError) -> Vec<Message> {
        vec![Message::named("error", &Form::Anthropic.body(error))]
    }

    fn end(&mut self) -> Vec<Message> {
        vec![Message::named(
            "message_stop",
            &json!({"type": "message_stop"}),
        )]
    }

    fn has_ended(&self) -> bool {
        self.has_ended
    }

    fn heartbeat(&self) -> Option<Message> {
        Some(Message::named("ping", &json!({"type": "ping"})))
    }
}
