//! Collects the engine's events into complete answers.

use super::app::new_id;
use super::events::Events;
use crate::engine::{AnswerUsage, EndReason, Event, TokenProbability};
use crate::error::RequestError;
use crate::text::{ToolCall, parse_tool_call};
use burn_gemma4::TextKind;

/// A tool call. The client sends the result of the call back under the same id.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub id: String,
    pub name: String,
    /// The arguments, as the text of a JSON object.
    pub arguments: String,
}

/// A part of an answer: text, a thought or a tool call.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    Text(String),
    Thought(String),
    Call(Call),
}

impl Part {
    /// Creates a part from a text. An incomplete tool call becomes a text part.
    pub fn of_text(kind: TextKind, text: String) -> Self {
        match kind {
            TextKind::Thought => Self::Thought(text),
            TextKind::Answer | TextKind::ToolCall => Self::Text(text),
        }
    }

    /// Creates a part from the text of a tool call. The text of an incomplete or malformed call becomes a text part, so that
    /// no output is lost.
    pub fn of_call(text: String, prefix: &str) -> Self {
        match parse_tool_call(&text) {
            Some(ToolCall { name, arguments }) => Self::Call(Call {
                id: new_id(prefix),
                name,
                arguments: serde_json::Value::Object(arguments).to_string(),
            }),
            None => Self::Text(text),
        }
    }
}

/// A complete answer.
#[derive(Debug, Default)]
pub(crate) struct CompleteAnswer {
    /// The parts of the answer in order. Consecutive texts form one part, and so do consecutive thoughts.
    pub parts: Vec<Part>,
    pub logprobs: Vec<TokenProbability>,
    pub end: Option<EndReason>,
    pub usage: AnswerUsage,
}

impl CompleteAnswer {
    fn push(&mut self, part: Part) {
        match (self.parts.last_mut(), part) {
            (Some(Part::Text(text)), Part::Text(more))
            | (Some(Part::Thought(text)), Part::Thought(more)) => *text += &more,
            (_, part) => self.parts.push(part),
        }
    }

    pub fn text(&self) -> String {
        let texts = self.parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    pub fn thoughts(&self) -> String {
        let texts = self.parts.iter().filter_map(|part| match part {
            Part::Thought(text) => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        self.parts.iter().filter_map(|part| match part {
            Part::Call(call) => Some(call),
            _ => None,
        })
    }
}

/// Waits for all answers of a request. The id of each tool call begins with `prefix`.
pub(crate) async fn collect(
    mut events: Events,
    choices: usize,
    prefix: &str,
) -> Result<Vec<CompleteAnswer>, RequestError> {
    let mut answers: Vec<CompleteAnswer> = (0..choices).map(|_| Default::default()).collect();
    while let Some(event) = events.next().await {
        match event {
            Event::Text {
                choice,
                kind,
                text,
                logprobs,
            } => {
                if !text.is_empty() {
                    answers[choice].push(Part::of_text(kind, text));
                }
                answers[choice].logprobs.extend(logprobs);
            }
            Event::ToolCall { choice, text } => {
                answers[choice].push(Part::of_call(text, prefix));
            }
            Event::End {
                choice,
                reason,
                usage,
            } => {
                answers[choice].end = Some(reason);
                answers[choice].usage = usage;
            }
            Event::Failed(error) => return Err(error),
        }
    }
    Ok(answers)
}
