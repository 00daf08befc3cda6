//! The messages of a chat request.

use crate::error::RequestError;
use crate::text::ChatMessage;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// A message in the client's request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessageField {
    role: String,
    content: Option<Content>,
    #[serde(rename = "name")]
    _name: Option<String>,
    tool_calls: Option<Vec<CallField>>,
    tool_call_id: Option<String>,
    #[serde(alias = "reasoning")]
    reasoning_content: Option<String>,
    // Fields of the server's answers, which clients send back with later requests.
    #[serde(rename = "refusal")]
    _refusal: Option<Value>,
    #[serde(rename = "annotations")]
    _annotations: Option<Value>,
    audio: Option<Value>,
    function_call: Option<Value>,
}

/// The content of a message: a text or a list of parts.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of parts")]
pub(crate) enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

/// A part of a message's content. Only parts of the type `text` are supported.
#[derive(Debug, Deserialize)]
pub(crate) struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// A tool call in an assistant message, which the client sends back.
#[derive(Debug, Deserialize)]
pub(crate) struct CallField {
    id: String,
    function: CallFunction,
}

#[derive(Debug, Deserialize)]
struct CallFunction {
    name: String,
    arguments: String,
}

impl Content {
    /// Returns the concatenated text of the content.
    pub fn into_text(self, field: &str) -> Result<String, RequestError> {
        let parts = match self {
            Self::Text(text) => return Ok(text),
            Self::Parts(parts) => parts,
        };
        let texts = parts.into_iter().enumerate().map(|(index, part)| {
            let field = |name| format!("{field}[{index}].{name}");
            match (part.kind.as_str(), part.text) {
                ("text" | "input_text" | "output_text", Some(text)) => Ok(text),
                ("text" | "input_text" | "output_text", None) => {
                    Err(RequestError::field(field("text"), "is missing"))
                }
                (kind, _) => {
                    let reason = format!(
                        "is {kind:?}; expected \"text\", because this server reads text only"
                    );
                    Err(RequestError::field(field("type"), reason))
                }
            }
        });
        texts.collect()
    }
}

/// Parses the arguments of a tool call in an assistant message. The arguments are the text of a JSON object.
pub(crate) fn arguments(field: &str, text: &str) -> Result<Map<String, Value>, RequestError> {
    match serde_json::from_str(text) {
        Ok(Value::Object(arguments)) => Ok(arguments),
        // Accept an empty text, which some clients send for a tool call without arguments.
        _ if text.trim().is_empty() => Ok(Map::new()),
        _ => Err(RequestError::field(field, "expected a JSON object as text")),
    }
}

/// Converts the messages of a request to a conversation.
pub(crate) fn conversation(messages: Vec<MessageField>) -> Result<Vec<ChatMessage>, RequestError> {
    if messages.is_empty() {
        return Err(RequestError::field(
            "messages",
            "expected at least 1 message",
        ));
    }
    let mut names = HashMap::new();
    let converted = messages.into_iter().enumerate();
    converted
        .map(|(index, message)| convert(index, message, &mut names))
        .collect()
}

/// Converts a message. `names` maps the ids of earlier tool calls to the names of their tools.
fn convert(
    index: usize,
    message: MessageField,
    names: &mut HashMap<String, String>,
) -> Result<ChatMessage, RequestError> {
    let field = |name: &str| format!("messages[{index}].{name}");
    let refuse = |name: &str, reason: &str| Err(RequestError::field(field(name), reason));
    if message.audio.is_some_and(|audio| !audio.is_null()) {
        return refuse("audio", "is not supported");
    }
    if message.function_call.is_some_and(|call| !call.is_null()) {
        return refuse("function_call", "is not supported; use `tool_calls`");
    }
    let content = message.content;
    let content = content.map(|content| content.into_text(&field("content")));
    let content = content.transpose()?;
    let calls = message.tool_calls.unwrap_or_default();
    if message.role != "assistant" && !calls.is_empty() {
        return refuse("tool_calls", "expected only in messages of the assistant");
    }
    match (message.role.as_str(), content) {
        ("assistant", content) => {
            if content.is_none() && calls.is_empty() {
                return refuse("content", "is missing");
            }
            let calls = calls.into_iter().enumerate().map(|(call, value)| {
                let field = field(&format!("tool_calls[{call}].function.arguments"));
                let arguments = arguments(&field, &value.function.arguments)?;
                names.insert(value.id.clone(), value.function.name.clone());
                Ok((value.id, value.function.name, arguments))
            });
            Ok(ChatMessage::Assistant {
                calls: calls.collect::<Result<_, RequestError>>()?,
                text: content.unwrap_or_default(),
                thoughts: message.reasoning_content,
            })
        }
        ("system" | "developer" | "user" | "tool", None) => refuse("content", "is missing"),
        ("system" | "developer", Some(text)) => Ok(ChatMessage::System(text)),
        ("user", Some(text)) => Ok(ChatMessage::User(text)),
        ("tool", Some(text)) => {
            let Some(id) = message.tool_call_id else {
                return refuse("tool_call_id", "is missing");
            };
            match names.get(&id) {
                Some(name) => Ok(ChatMessage::Tool {
                    name: name.clone(),
                    id,
                    text,
                }),
                None => refuse("tool_call_id", "does not belong to an earlier tool call"),
            }
        }
        (role, _) => {
            let reason = format!(
                "is {role:?}; expected \"system\", \"developer\", \"user\", \"assistant\" or \"tool\""
            );
            refuse("role", &reason)
        }
    }
}
