//! The messages of a request to Anthropic's API. A message consists of content blocks.

use super::super::media::{Kind, MediaSource, RequestMedia, shown};
use crate::error::RequestError;
use crate::text::{ChatMessage, Content, Part};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// A message in the client's request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessageField {
    role: String,
    content: Blocks,
}

/// The content of a message or a tool result: a text or a list of blocks.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of content blocks")]
pub(crate) enum Blocks {
    Text(String),
    Blocks(Vec<Block>),
}

/// A content block. One struct has the fields of all block types, so that the error for an unsupported type can name the
/// type.
#[derive(Debug, Deserialize)]
pub(crate) struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Map<String, Value>>,
    tool_use_id: Option<String>,
    content: Option<Blocks>,
    is_error: Option<bool>,
    source: Option<Value>,
}

impl Blocks {
    /// Returns the concatenated text of all blocks. Refuses blocks that are not text.
    pub fn into_text(self, field: &str) -> Result<String, RequestError> {
        let blocks = match self {
            Self::Text(text) => return Ok(text),
            Self::Blocks(blocks) => blocks,
        };
        let texts = blocks.into_iter().enumerate().map(|(index, block)| {
            let field = format!("{field}[{index}]");
            match block.kind.as_str() {
                "text" => block.into_text(&field),
                kind => Err(refused_type(&field, kind, "\"text\"")),
            }
        });
        texts.collect()
    }

    /// Returns the texts and images of a tool result. `media` collects the images.
    fn into_parts(
        self,
        field: &str,
        media: &mut RequestMedia<'_>,
    ) -> Result<Vec<Part>, RequestError> {
        let blocks = self.into_blocks().into_iter().enumerate();
        let parts = blocks.map(|(index, block)| {
            let field = format!("{field}[{index}]");
            Ok(match block.kind.as_str() {
                "text" => Part::Text(block.into_text(&field)?),
                "image" => Part::Image(block.add_image(&field, media)?),
                kind => return Err(refused_type(&field, kind, "\"text\" or \"image\"")),
            })
        });
        parts.collect()
    }

    fn into_blocks(self) -> Vec<Block> {
        match self {
            Self::Blocks(blocks) => blocks,
            Self::Text(text) => vec![Block {
                kind: "text".into(),
                text: Some(text),
                thinking: None,
                id: None,
                name: None,
                input: None,
                tool_use_id: None,
                content: None,
                is_error: None,
                source: None,
            }],
        }
    }
}

impl Block {
    /// Returns the text of a text block. Refuses an image in it, which the model would not see.
    fn into_text(self, field: &str) -> Result<String, RequestError> {
        if self.source.is_some_and(|source| !source.is_null()) {
            let reason = "is in a block of the type \"text\"; expected only in an image";
            return Err(RequestError::field(format!("{field}.source"), reason));
        }
        self.text.ok_or_else(|| missing(field, "text"))
    }

    /// Adds an image to the media of the request. Returns its index.
    fn add_image(self, field: &str, media: &mut RequestMedia<'_>) -> Result<usize, RequestError> {
        let Some(source) = self.source else {
            return Err(missing(field, "source"));
        };
        let field = format!("{field}.source");
        let Value::Object(mut source) = source else {
            return Err(RequestError::field(field, "expected an object"));
        };
        let mut text = |name: &str| match source.remove(name) {
            Some(Value::String(text)) => Ok(text),
            None | Some(Value::Null) => Err(missing(&field, name)),
            Some(_) => Err(RequestError::field(
                format!("{field}.{name}"),
                "expected a text",
            )),
        };
        match text("type")?.as_str() {
            "base64" => {
                let (media_type, data) = (text("media_type")?, text("data")?);
                if let Some(name) = source.keys().next() {
                    let reason = format!(
                        "has the unknown field {:?}; expected `type`, `media_type` and `data`",
                        shown(name)
                    );
                    return Err(RequestError::field(field, reason));
                }
                let kind = Kind::Image { soft_tokens: None };
                media.add(&field, kind, MediaSource::Base64 { media_type, data })
            }
            kind => {
                let reason = match kind {
                    "url" => "this server loads nothing from the network".to_owned(),
                    "file" => "this server stores no files".to_owned(),
                    kind => format!("{:?} is unknown", shown(kind)),
                };
                let reason = format!(
                    "is {:?}; expected \"base64\", because {reason}",
                    shown(kind)
                );
                Err(RequestError::field(format!("{field}.type"), reason))
            }
        }
    }
}

fn missing(field: &str, name: &str) -> RequestError {
    RequestError::field(format!("{field}.{name}"), "is missing")
}

fn refused_type(field: &str, kind: &str, expected: &str) -> RequestError {
    let reason = format!("is {:?}; expected {expected}", shown(kind));
    RequestError::field(format!("{field}.type"), reason)
}

/// Converts the messages to a conversation. Each tool result in a user message becomes a separate message.
pub(crate) fn conversation(
    messages: Vec<MessageField>,
    media: &mut RequestMedia<'_>,
) -> Result<Vec<ChatMessage>, RequestError> {
    if messages.is_empty() {
        return Err(RequestError::field(
            "messages",
            "expected at least 1 message",
        ));
    }
    let (mut converted, mut names) = (Vec::new(), HashMap::new());
    for (index, message) in messages.into_iter().enumerate() {
        let field = format!("messages[{index}]");
        let blocks = message.content.into_blocks();
        match message.role.as_str() {
            "user" => convert_user(&field, blocks, &names, media, &mut converted)?,
            "assistant" => converted.push(convert_assistant(&field, blocks, &mut names)?),
            role => {
                let reason = format!("is {:?}; expected \"user\" or \"assistant\"", shown(role));
                return Err(RequestError::field(format!("{field}.role"), reason));
            }
        }
    }
    match converted.last() {
        Some(ChatMessage::Assistant { .. }) => Err(RequestError::field(
            "messages",
            "the last message is of the assistant; expected a message of the user, because an answer cannot be continued",
        )),
        _ => Ok(converted),
    }
}

fn convert_user(
    message: &str,
    blocks: Vec<Block>,
    names: &HashMap<String, String>,
    media: &mut RequestMedia<'_>,
    converted: &mut Vec<ChatMessage>,
) -> Result<(), RequestError> {
    let mut parts = Vec::new();
    for (index, block) in blocks.into_iter().enumerate() {
        let field = format!("{message}.content[{index}]");
        match block.kind.as_str() {
            "text" => {
                parts.push(Part::Text(block.into_text(&field)?));
            }
            "image" => parts.push(Part::Image(block.add_image(&field, media)?)),
            "tool_result" => {
                let id = block
                    .tool_use_id
                    .ok_or_else(|| missing(&field, "tool_use_id"))?;
                let Some(name) = names.get(&id) else {
                    let reason = "does not belong to an earlier tool_use";
                    return Err(RequestError::field(format!("{field}.tool_use_id"), reason));
                };
                let content = block.content.unwrap_or(Blocks::Text(String::new()));
                let mut result = content.into_parts(&format!("{field}.content"), media)?;
                if block.is_error.unwrap_or(false) {
                    result.insert(0, Part::Text("error: ".into()));
                }
                converted.push(ChatMessage::Tool {
                    name: name.clone(),
                    id,
                    content: result.into(),
                });
            }
            kind => {
                let expected = "\"text\", \"image\" or \"tool_result\"";
                return Err(refused_type(&field, kind, expected));
            }
        }
    }
    if !parts.is_empty() {
        converted.push(ChatMessage::User(Content::from(parts)));
    }
    Ok(())
}

fn convert_assistant(
    message: &str,
    blocks: Vec<Block>,
    names: &mut HashMap<String, String>,
) -> Result<ChatMessage, RequestError> {
    let (mut text, mut thoughts, mut calls) = (String::new(), None, Vec::new());
    for (index, block) in blocks.into_iter().enumerate() {
        let field = format!("{message}.content[{index}]");
        match block.kind.as_str() {
            "text" => text += &block.text.ok_or_else(|| missing(&field, "text"))?,
            "thinking" => {
                let thinking = block.thinking.ok_or_else(|| missing(&field, "thinking"))?;
                *thoughts.get_or_insert_with(String::new) += &thinking;
            }
            "redacted_thinking" => (),
            "tool_use" => {
                let id = block.id.ok_or_else(|| missing(&field, "id"))?;
                let name = block.name.ok_or_else(|| missing(&field, "name"))?;
                names.insert(id.clone(), name.clone());
                calls.push((id, name, block.input.unwrap_or_default()));
            }
            kind => {
                let expected = "\"text\", \"thinking\" or \"tool_use\"";
                return Err(refused_type(&field, kind, expected));
            }
        }
    }
    Ok(ChatMessage::Assistant {
        text,
        thoughts,
        calls,
    })
}
